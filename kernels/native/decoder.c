/* What a decode step does on a CPU, in one thread, for float32 models like Llama, between two attentions.
 * Weights that are float16 or bfloat16 numbers are read as such: half the bytes, the same products.
 *
 * All tensors are contiguous float32. B rows (one token each), N hidden size, H query heads, H_kv KV heads,
 * G = H / H_kv, D head_dim, I the MLP's inner size.
 */

#include "lanes.h"

/* Weights are converted to float32 as they are read, which loses nothing. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *weight; /* [rows, columns] */
    const float *bias;  /* [rows], or NULL */
    int64_t rows, columns, kind;
} product;

typedef struct {
    const float *weight; /* [columns]; NULL: there is no such norm */
    float eps;
} norm;

typedef struct {
    norm input, queries_norm, keys_norm, inner;
    product queries, keys, values, output, gate, up, down;
    int64_t head_dim;
} layer;

/* LANES weights from number `at` on. */
INLINE lanes load_weights(const int kind, const void *weight, int64_t at) {
    if (kind == FLOAT32) return load((const float *)weight + at);
    short_lanes its;
    memcpy(&its, (const uint16_t *)weight + at, sizeof its);
    if (kind == BFLOAT16) return (lanes)(__builtin_convertvector(its, int_lanes) << 16);
    return load_halves((const uint16_t *)weight + at);
}

/* The kinds of weights that this machine reads, a bit for each. */
int kvferry_kinds(void) {
#ifdef __F16C__
    return 1 << FLOAT32 | 1 << BFLOAT16 | 1 << FLOAT16;
#else
    return 1 << FLOAT32 | 1 << BFLOAT16;
#endif
}

/* R rows of the weights times B tokens; columns are a multiple of LANES. */
INLINE void tile(const int kind, const int R, const int B, const product *its, int64_t row, const float *x,
                 float *y) {
    const int64_t columns = its->columns, rows = its->rows;
    lanes sums[8][3];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums[r][b] = (lanes){0};
    for (int64_t k = 0; k < columns; k += LANES) {
        lanes tokens[3];
        for (int b = 0; b < B; b++) tokens[b] = load(x + b * columns + k);
        for (int r = 0; r < R; r++) {
            const lanes weights = load_weights(kind, its->weight, (row + r) * columns + k);
            for (int b = 0; b < B; b++) sums[r][b] += weights * tokens[b];
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) y[b * rows + row + r] = sum(sums[r][b]);
}

INLINE void tiles(const int kind, const int R, int64_t B, const product *its, int64_t row, const float *x,
                  float *y) {
    const int64_t columns = its->columns, rows = its->rows;
    int64_t b = 0;
    for (; b + 3 <= B; b += 3) tile(kind, R, 3, its, row, x + b * columns, y + b * rows);
    if (B - b == 2) tile(kind, R, 2, its, row, x + b * columns, y + b * rows);
    if (B - b == 1) tile(kind, R, 1, its, row, x + b * columns, y + b * rows);
}

INLINE void multiply_kind(const int kind, const product *its, int64_t B, const float *x, float *y) {
    int64_t row = 0;
    if (B == 1)
        for (; row + 8 <= its->rows; row += 8) tile(kind, 8, 1, its, row, x, y);
    for (; row + 4 <= its->rows; row += 4) tiles(kind, 4, B, its, row, x, y);
    for (; row < its->rows; row++) tiles(kind, 1, B, its, row, x, y);
}

/* y [B, rows] = x [B, columns] weight^T + bias. */
static void multiply(const product *its, int64_t B, const float *x, float *y) {
    if (its->kind == FLOAT32) multiply_kind(FLOAT32, its, B, x, y);
    if (its->kind == BFLOAT16) multiply_kind(BFLOAT16, its, B, x, y);
    if (its->kind == FLOAT16) multiply_kind(FLOAT16, its, B, x, y);
    if (its->bias)
        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < its->rows; i++) y[b * its->rows + i] += its->bias[i];
}

/* y = RMSNorm of x, both [rows, columns]; they may be the same. */
static void normalise(const norm *its, int64_t rows, int64_t columns, const float *x, float *y) {
    for (int64_t row = 0; row < rows; row++, x += columns, y += columns) {
        lanes squares = {0};
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES) squares += load(x + i) * load(x + i);
        float total = sum(squares);
        for (; i < columns; i++) total += x[i] * x[i];
        const float scale = 1.0f / sqrtf(total / (float)columns + its->eps);
        for (i = 0; i < columns; i++) y[i] = its->weight[i] * (x[i] * scale);
    }
}

static void add(int64_t count, const float *x, float *total) {
    for (int64_t i = 0; i < count; i++) total[i] += x[i];
}

/* Rotary positions of [B, heads, D] in place; cos and sin are [B, D]. */
static void rotate(int64_t B, int64_t heads, int64_t D, const float *cos, const float *sin, float *x) {
    for (int64_t b = 0; b < B; b++, cos += D, sin += D)
        for (int64_t head = 0; head < heads; head++, x += D)
            for (int64_t i = 0; i < D / 2; i++) {
                const float first = x[i], second = x[i + D / 2];
                x[i] = first * cos[i] - second * sin[i];
                x[i + D / 2] = second * cos[i + D / 2] + first * sin[i + D / 2];
            }
}

/* gate = silu(gate) * up. */
static void activate(int64_t count, float *gate, const float *up) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const lanes x = load(gate + i), bounded = (lanes)((int_lanes)x & ~(x < -88.0f));
        const lanes result = bounded / (1.0f + exponential(-bounded)) * load(up + i);
        store(gate + i, result);
    }
    for (; i < count; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* Before a layer's attention. change [B, N], if any, is added to hidden [B, N]; scratch is [B, N]. */
void kvferry_project(const layer *its, int64_t B, float *hidden, const float *change, const float *cos,
                     const float *sin, float *scratch, float *queries, float *keys, float *values) {
    const int64_t N = its->queries.columns, D = its->head_dim;
    const int64_t H = its->queries.rows / D, H_kv = its->keys.rows / D;
    if (change) add(B * N, change, hidden);
    normalise(&its->input, B, N, hidden, scratch);
    multiply(&its->queries, B, scratch, queries);
    multiply(&its->keys, B, scratch, keys);
    multiply(&its->values, B, scratch, values);
    if (its->queries_norm.weight) normalise(&its->queries_norm, B * H, D, queries, queries);
    if (its->keys_norm.weight) normalise(&its->keys_norm, B * H_kv, D, keys, keys);
    rotate(B, H, D, cos, sin, queries);
    rotate(B, H_kv, D, cos, sin, keys);
}

/* After a layer's attention [B, H D]. Into hidden [B, N] goes what it adds, and into change [B, N] what the
 * MLP will add; scratch is [2, B, I]. */
void kvferry_finish(const layer *its, int64_t B, const float *attended, float *hidden, float *change,
                    float *scratch) {
    const int64_t N = its->output.rows, I = its->gate.rows;
    float *up = scratch + B * I;
    multiply(&its->output, B, attended, change);
    add(B * N, change, hidden);
    normalise(&its->inner, B, N, hidden, change);
    multiply(&its->gate, B, change, scratch);
    multiply(&its->up, B, change, up);
    activate(B * I, scratch, up);
    multiply(&its->down, B, scratch, change);
}

/* After the last layer: hidden and change [B, N], as above, to logits [B, V]. */
void kvferry_logits(const norm *last, const product *head, int64_t B, float *hidden, const float *change,
                    float *logits) {
    add(B * head->columns, change, hidden);
    normalise(last, B, head->columns, hidden, hidden);
    multiply(head, B, hidden, logits);
}
