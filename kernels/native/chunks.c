/* Chunk scores of a prompt (kernels/chunk_scores): softmax of queries over their chunk's keys, summed by column. */

#include "attention.h"

/* Queries and columns of a tile of products, whose sums stay in registers. */
#define TILE_ROWS (WIDTH == LANES ? 4 : 8)
#define TILE_COLUMNS (2 * WIDTH)

/* The rows of one head: from the first one, and numbers from a row to the next. */
typedef struct {
    const float *first;
    int64_t stride;
} matrix;

/* logits[r, 0 .. TILE_COLUMNS] = rows[r] . columns, with columns [D, stride]. */
INLINE void multiply(const float *const *rows, const float *columns, int64_t D, float *logits, int64_t stride) {
    wide sums[TILE_ROWS][2] = {0};
    for (int64_t d = 0; d < D; d++, columns += stride) {
        const wide left = load_wide(columns), right = load_wide(columns + WIDTH);
        for (int r = 0; r < TILE_ROWS; r++) {
            sums[r][0] += rows[r][d] * left;
            sums[r][1] += rows[r][d] * right;
        }
    }
    for (int r = 0; r < TILE_ROWS; r++) memcpy(logits + r * stride, sums[r], sizeof sums[r]);
}

/* e^(x - the largest x) in place of each x, and their sum. count is a multiple of LANES. */
INLINE float exponentials(float *its, int64_t count) {
    lanes top = load(its), all = {0};
    for (int64_t t = LANES; t < count; t += LANES) {
        const lanes x = load(its + t);
        const int_lanes above = x > top;
        top = (lanes)(((int_lanes)x & above) | ((int_lanes)top & ~above));
    }
    float largest = top[0];
    for (int i = 1; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    for (int64_t t = 0; t < count; t += LANES) {
        const lanes x = exponential(load(its + t) - largest);
        store(its + t, x);
        all += x;
    }
    return sum(all);
}

/* One chunk of one head: scores[t] = n / (G M) sum over G M queries of softmax over the n keys.
 *
 * Scratch: [D + TILE_ROWS + 1, padded], with n rounded up to a multiple of TILE_COLUMNS. */
static void score_chunk(matrix queries, int64_t group_stride, int64_t G, int64_t M, matrix keys, int64_t n, int64_t D,
                        float scaling, float *scratch, float *scores) {
    const int64_t padded = (n + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS, total = G * M;
    float *columns = scratch, *logits = columns + D * padded, *sums = logits + TILE_ROWS * padded;
    for (int64_t d = 0; d < D; d++)
        for (int64_t t = 0; t < padded; t++)
            columns[d * padded + t] = t < n ? keys.first[t * keys.stride + d] * scaling : 0;
    memset(sums, 0, (size_t)padded * sizeof *sums);
    for (int64_t first = 0; first < total; first += TILE_ROWS) {
        const float *rows[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            const int64_t at = first + r < total ? first + r : total - 1; /* counted once, see factors */
            rows[r] = queries.first + at / M * group_stride + at % M * queries.stride;
        }
        for (int64_t t = 0; t < padded; t += TILE_COLUMNS) multiply(rows, columns + t, D, logits + t, padded);
        float factors[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            float *its = logits + r * padded;
            for (int64_t t = n; t < padded; t++) its[t] = -INFINITY;
            const float all = exponentials(its, padded);
            factors[r] = first + r < total ? (float)n / (float)total / all : 0;
        }
        for (int64_t t = 0; t < padded; t += LANES) {
            lanes its = load(sums + t);
            for (int64_t r = 0; r < TILE_ROWS; r++) its += factors[r] * load(logits + r * padded + t);
            store(sums + t, its);
        }
    }
    memcpy(scores, sums, (size_t)n * sizeof *sums);
}

/* Scores of the chunks `first` to `end` of all heads' (a head's chunks are beside one another).
 *
 * strides: numbers between heads, groups and rows of queries [H, G, M, D] and between heads and rows of keys
 * [H, T, D]; scores [H, T]. Chunks have their own queries, and M is T; or, with is_shared, all M. Returns 0, or
 * NO_MEMORY. */
int kvferry_chunk_scores(const float *queries, const float *keys, const int64_t *strides, int64_t G, int64_t M,
                         int64_t T, int64_t D, int64_t chunk, int is_shared, int64_t first, int64_t end,
                         float scaling, float *scores) {
    const int64_t num_chunks = (T + chunk - 1) / chunk, longest = chunk < T ? chunk : T;
    float *scratch = malloc((size_t)(D + TILE_ROWS + 1) * (size_t)(longest + TILE_COLUMNS) * sizeof *scratch);
    if (!scratch) return NO_MEMORY;
    for (int64_t i = first; i < end; i++) {
        const int64_t head = i / num_chunks, at = i % num_chunks * chunk, n = T - at < chunk ? T - at : chunk;
        const matrix own = {queries + head * strides[0] + (is_shared ? 0 : at * strides[2]), strides[2]};
        const matrix its_keys = {keys + head * strides[3] + at * strides[4], strides[4]};
        score_chunk(own, strides[1], G, is_shared ? M : n, its_keys, n, D, scaling, scratch, scores + head * T + at);
    }
    free(scratch);
    return 0;
}
