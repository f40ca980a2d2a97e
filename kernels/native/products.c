/* Products of float32 rows and a linear layer's weights, in tiles whose sums stay in registers.
 *
 * B tokens (rows of x). All tensors are contiguous; weights that are float16 or bfloat16 numbers are read as such:
 * half the bytes, the same products. Columns are a multiple of LANES. Each number of y is summed up in one order,
 * whatever B, the tile and the number of threads are.
 */

#include "products.h"

#include "lanes.h"
#include "threads.h"

/* Tokens of a tile, and rows of weights beside so many tokens: as many sums as there are registers for. */
#ifdef __AVX512VL__
enum { MOST_TOKENS = 8 };
#define TILE_ROWS(B) ((B) <= 3 ? 8 : (B) == 4 ? 6 : (B) <= 6 ? 4 : 3)
#else
enum { MOST_TOKENS = 3 };
#define TILE_ROWS(B) ((B) == 1 ? 8 : 4)
#endif

/* A part's rows are a multiple of each tile's, and about so many bytes of weights. */
enum { LEAST_ROWS = 24, MOST_ROWS = 96, PART_BYTES = 1 << 17 };

/* Numbers of x that a tile reads before the next rows' tile reads them again, from the nearest cache. */
enum { NEAR = 4096 };

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
    lanes low, high;
    memcpy(&low, &its, sizeof low);
    memcpy(&high, (const char *)&its + sizeof low, sizeof high);
    return low + high;
#else
    return its;
#endif
}

/* R rows of weights times B tokens of x, the columns from `first` up to `end`. Before the first columns sums are 0,
 * and those of a tile that is not at its last columns are in `partial` [R, B]. */
INLINE void tile(const int kind, const int R, const int B, const product *its, int64_t row, const float *x, float *y,
                 int64_t first, int64_t end, wide *partial) {
    const int64_t columns = its->columns, rows = its->rows;
    wide sums[8][MOST_TOKENS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r][b] = first ? partial[r * B + b] : (wide){0};
    int64_t k = first;
    for (; k + WIDTH <= end; k += WIDTH) {
        if (R <= B) {
            wide weights[8];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) weights[r] = wide_weights(kind, its->weight, (row + r) * columns + k);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                const wide token = load_wide(x + b * columns + k);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][b] += weights[r] * token;
            }
        } else {
            wide tokens[MOST_TOKENS];
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) tokens[b] = load_wide(x + b * columns + k);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const wide weights = wide_weights(kind, its->weight, (row + r) * columns + k);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) sums[r][b] += weights * tokens[b];
            }
        }
    }
    if (end < columns) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) partial[r * B + b] = sums[r][b];
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            lanes all = halves_added(sums[r][b]);
            if (k < end) all += some_weights(kind, its->weight, (row + r) * columns + k) * load(x + b * columns + k);
            y[b * rows + row + r] = sum(all) + (its->bias ? its->bias[row + r] : 0.0f);
        }
}

/* The rows from `first` up to `end` times B tokens. */
INLINE void tiles(const int kind, const int B, const product *its, int64_t first, int64_t end, const float *x,
                  float *y) {
    const int R = TILE_ROWS(B);
    const int64_t columns = its->columns, block = columns * B <= NEAR ? columns : NEAR / B / WIDTH * WIDTH;
    wide partial[MOST_ROWS * MOST_TOKENS];
    for (int64_t k = 0; k < columns; k += block) {
        const int64_t last = k + block < columns ? k + block : columns;
        int64_t row = first;
        for (; row + R <= end; row += R) tile(kind, R, B, its, row, x, y, k, last, partial + (row - first) * B);
        for (; row < end; row++) tile(kind, 1, B, its, row, x, y, k, last, partial + (row - first) * B);
    }
}

INLINE void multiply_kind(const int kind, const product *its, int64_t first, int64_t end, int64_t B, const float *x,
                          float *y) {
    for (int64_t b = 0; b < B; b += MOST_TOKENS) {
        const float *from = x + b * its->columns;
        float *to = y + b * its->rows;
        switch (B - b < MOST_TOKENS ? B - b : MOST_TOKENS) {
            case 1: tiles(kind, 1, its, first, end, from, to); break;
            case 2: tiles(kind, 2, its, first, end, from, to); break;
            case 3: tiles(kind, 3, its, first, end, from, to); break;
#ifdef __AVX512VL__
            case 4: tiles(kind, 4, its, first, end, from, to); break;
            case 5: tiles(kind, 5, its, first, end, from, to); break;
            case 6: tiles(kind, 6, its, first, end, from, to); break;
            case 7: tiles(kind, 7, its, first, end, from, to); break;
            case 8: tiles(kind, 8, its, first, end, from, to); break;
#endif
        }
    }
}

int64_t part_rows(const product *its) {
    const int64_t row_bytes = its->columns * (its->kind == FLOAT32 ? 4 : 2);
    const int64_t rows = PART_BYTES / row_bytes / LEAST_ROWS * LEAST_ROWS;
    return rows < LEAST_ROWS ? LEAST_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
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
