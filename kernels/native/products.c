/* Products of float32 rows and a linear layer's weights, in tiles whose sums stay in registers.
 *
 * B tokens (rows of x). All tensors are contiguous; weights that are float16 or bfloat16 numbers are read as such:
 * half the bytes, the same products. Columns are a multiple of LANES. Each number of y is summed up in one order,
 * whatever B, the tile and the number of threads are.
 */

#include "products.h"

#include "lanes.h"
#include "threads.h"

/* Tokens of a tile, and rows of weights beside so many: as many sums as there are registers for, and tokens that stay
 * in the nearest cache. */
#ifdef __AVX512VL__
enum { MOST_TOKENS = 4 };
#define TILE_ROWS(B) ((B) <= 3 ? 8 : 6)
#else
enum { MOST_TOKENS = 3 };
#define TILE_ROWS(B) ((B) == 1 ? 8 : 4)
#endif
enum { MOST_ROWS = 8 };

/* A part's rows are a multiple of each tile's, and about so many bytes of weights. */
enum { LEAST_PART = 24, MOST_PART = 96, PART_BYTES = 1 << 17 };

/* Bytes of a row from which weights are fetched ahead. */
enum { AHEAD = 512 };

/* Products of fewer weights and tokens are not worth another thread. */
enum { SHARED = 1 << 19 };

/* The kinds of weights that this machine reads, a bit for each. */
int kvferry_kinds(void) {
#ifdef __F16C__
    return 1 << FLOAT32 | 1 << BFLOAT16 | 1 << FLOAT16;
#else
    return 1 << FLOAT32 | 1 << BFLOAT16;
#endif
}

INLINE int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }

/* WIDTH weights from number `at` on. */
INLINE wide wide_weights(const int kind, const void *weight, int64_t at) {
    if (kind == FLOAT32) return load_wide((const float *)weight + at);
    const uint16_t *from = (const uint16_t *)weight + at;
    short_wide its;
    memcpy(&its, from, sizeof its);
    if (kind == BFLOAT16) return (wide)(__builtin_convertvector(its, int_wide) << 16);
#ifdef __AVX512F__
    return (wide)_mm512_cvtph_ps((__m256i)its);
#else
    return load_halves(from);
#endif
}

/* The same of LANES. */
INLINE lanes some_weights(const int kind, const void *weight, int64_t at) {
    if (kind == FLOAT32) return load((const float *)weight + at);
    const uint16_t *from = (const uint16_t *)weight + at;
    short_lanes its;
    memcpy(&its, from, sizeof its);
    if (kind == BFLOAT16) return (lanes)(__builtin_convertvector(its, int_lanes) << 16);
    return load_halves(from);
}

INLINE lanes halves_added(wide its) {
#ifdef __AVX512F__
    const __m512d all = (__m512d)its;
    return (lanes)_mm512_castpd512_pd256(all) + (lanes)_mm512_extractf64x4_pd(all, 1);
#else
    return its;
#endif
}

/* sums [R, B] of R rows of weights, `apart` from one another, times B tokens of x, but for columns beyond the last
 * WIDTH. */
INLINE void tile(const int kind, const int R, const int B, const product *its, int64_t row, int64_t apart,
                 const float *x, wide *sums) {
    const int64_t columns = its->columns;
    wide own[MOST_ROWS][MOST_TOKENS]; /* in registers */
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) own[r][b] = (wide){0};
    for (int64_t k = 0; k + WIDTH <= columns; k += WIDTH) {
        wide tokens[MOST_TOKENS];
        for (int b = 0; b < B; b++) tokens[b] = load_wide(x + b * columns + k);
        for (int r = 0; r < R; r++) {
            const wide weights = wide_weights(kind, its->weight, (row + r * apart) * columns + k);
            __builtin_prefetch((const char *)its->weight + ((row + r * apart) * columns + k) * size_of(kind) + AHEAD);
            for (int b = 0; b < B; b++) own[r][b] = multiplied_added(weights, tokens[b], own[r][b]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums[r * B + b] = own[r][b];
}

/* y of R rows and B tokens, from their sums. */
static void finish(const product *its, int64_t row, int64_t apart, int64_t R, int64_t B, const float *x,
                   const wide *sums, float *y) {
    const int64_t columns = its->columns, last = columns / WIDTH * WIDTH;
    for (int64_t end = row + R * apart; row < end; row += apart)
        for (int64_t b = 0; b < B; b++) {
            lanes all = halves_added(*sums++);
            if (last < columns)
                all += some_weights(its->kind, its->weight, row * columns + last) * load(x + b * columns + last);
            y[b * its->rows + row] = sum(all) + (its->bias ? its->bias[row] : 0.0f);
        }
}

/* The rows from `first` up to `end` times B tokens. A tile's rows are apart, so that one tile after another reads each
 * of R places of the memory from beginning to end, which processors foresee. */
INLINE void tiles(const int kind, const int B, const product *its, int64_t first, int64_t end, const float *x,
                  float *y) {
    const int R = TILE_ROWS(B);
    wide sums[MOST_ROWS * MOST_TOKENS];
    const int64_t apart = (end - first) / R;
    for (int64_t row = first; row < first + apart; row++) {
        tile(kind, R, B, its, row, apart, x, sums);
        finish(its, row, apart, R, B, x, sums, y);
    }
    for (int64_t row = first + R * apart; row < end; row++) {
        for (int b = 0; b < B; b++) tile(kind, 1, 1, its, row, 0, x + b * its->columns, sums + b);
        finish(its, row, 1, 1, B, x, sums, y);
    }
}

INLINE void multiply_kind(const int kind, const product *its, int64_t first, int64_t end, int64_t B, const float *x,
                          float *y) {
    for (int64_t b = 0; b < B; b += MOST_TOKENS) {
        const float *from = x + b * its->columns;
        float *to = y + b * its->rows;
        if (B - b >= MOST_TOKENS)
            tiles(kind, MOST_TOKENS, its, first, end, from, to);
        else if (B - b == 3)
            tiles(kind, 3, its, first, end, from, to);
        else if (B - b == 2)
            tiles(kind, 2, its, first, end, from, to);
        else
            tiles(kind, 1, its, first, end, from, to);
    }
}

int64_t part_rows(const product *its) {
    const int64_t row_bytes = its->columns * size_of(its->kind);
    const int64_t rows = PART_BYTES / row_bytes / LEAST_PART * LEAST_PART;
    return rows < LEAST_PART ? LEAST_PART : rows > MOST_PART ? MOST_PART : rows;
}

int64_t num_parts(const product *its) { return (its->rows + part_rows(its) - 1) / part_rows(its); }

int64_t threads_for(int64_t num_weights, int64_t B, int64_t threads) { return num_weights * B < SHARED ? 1 : threads; }

void multiply_rows(const product *its, int64_t first, int64_t end, int64_t B, const float *x, float *y) {
    if (its->kind == FLOAT32) multiply_kind(FLOAT32, its, first, end, B, x, y);
    if (its->kind == BFLOAT16) multiply_kind(BFLOAT16, its, first, end, B, x, y);
    if (its->kind == FLOAT16) multiply_kind(FLOAT16, its, first, end, B, x, y);
}

typedef struct {
    const product *const *products;
    float *const *y;
    int64_t B;
    const float *x;
} products;

static void multiply_parts(void *work, int64_t first, int64_t end) {
    const products *all = work;
    for (int64_t part = first; part < end; part++) {
        int64_t i = 0, at = part;
        for (; at >= num_parts(all->products[i]); i++) at -= num_parts(all->products[i]);
        const product *its = all->products[i];
        const int64_t row = at * part_rows(its), end = row + part_rows(its);
        multiply_rows(its, row, end < its->rows ? end : its->rows, all->B, all->x, all->y[i]);
    }
}

void multiply(const product *const *its, float *const *y, int number, int64_t B, const float *x, int64_t threads) {
    products all = {its, y, B, x};
    int64_t parts = 0, num_weights = 0;
    for (int i = 0; i < number; i++) {
        parts += num_parts(its[i]);
        num_weights += its[i]->rows * its[i]->columns;
    }
    share(multiply_parts, &all, parts, 1, threads_for(num_weights, B, threads));
}

void kvferry_multiply(const product *its, int64_t B, int64_t threads, const float *x, float *y) {
    multiply(&its, &y, 1, B, x, threads);
}
