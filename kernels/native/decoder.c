/* What a decode step does on a CPU for float32 models like Llama, between two attentions. Products are shared by
 * several threads, and the rest, which is short, is one thread's.
 *
 * All tensors but weights are contiguous float32. B rows (one token each), N hidden size, H query heads, H_kv KV
 * heads, G = H / H_kv, D head_dim, I the MLP's inner size.
 */

#include "lanes.h"
#include "products.h"
#include "threads.h"

typedef struct {
    const float *weight; /* [columns]; NULL: there is no such norm */
    float eps;
} norm;

typedef struct {
    norm input, queries_norm, keys_norm, inner;
    product queries, keys, values, output, gate, up, down;
    int64_t head_dim;
} layer;

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

/* What the threads that compute an MLP's gate and up share. */
typedef struct {
    const layer *its;
    int64_t B;
    const float *x;
    float *gate, *up;
} inner;

/* Some parts of gate = silu(gate) * up, with both products. */
static void multiply_inner(void *work, int64_t first, int64_t end) {
    const inner *all = work;
    const product *gate = &all->its->gate, *up = &all->its->up;
    const int64_t rows = part_rows(gate), I = gate->rows;
    for (int64_t part = first; part < end; part++) {
        const int64_t at = part * rows, count = at + rows < I ? rows : I - at;
        multiply_rows(gate, at, at + count, all->B, all->x, all->gate);
        multiply_rows(up, at, at + count, all->B, all->x, all->up);
        for (int64_t b = 0; b < all->B; b++) activate(count, all->gate + b * I + at, all->up + b * I + at);
    }
}

/* Before a layer's attention. change [B, N], if any, is added to hidden [B, N]; scratch is [B, N]. */
void kvferry_project(const layer *its, int64_t B, int64_t threads, float *hidden, const float *change,
                     const float *cos, const float *sin, float *scratch, float *queries, float *keys,
                     float *values) {
    const int64_t N = its->queries.columns, D = its->head_dim;
    const int64_t H = its->queries.rows / D, H_kv = its->keys.rows / D;
    const product *const products[] = {&its->queries, &its->keys, &its->values};
    float *const y[] = {queries, keys, values};
    if (change) add(B * N, change, hidden);
    normalise(&its->input, B, N, hidden, scratch);
    multiply(products, y, 3, B, scratch, threads);
    if (its->queries_norm.weight) normalise(&its->queries_norm, B * H, D, queries, queries);
    if (its->keys_norm.weight) normalise(&its->keys_norm, B * H_kv, D, keys, keys);
    rotate(B, H, D, cos, sin, queries);
    rotate(B, H_kv, D, cos, sin, keys);
}

/* After a layer's attention [B, H D]. Into hidden [B, N] goes what it adds, and into change [B, N] what the
 * MLP will add; scratch is [2, B, I]. */
void kvferry_finish(const layer *its, int64_t B, int64_t threads, const float *attended, float *hidden,
                    float *change, float *scratch) {
    const int64_t N = its->output.rows, I = its->gate.rows;
    inner all = {its, B, change, scratch, scratch + B * I};
    kvferry_multiply(&its->output, B, threads, attended, change);
    add(B * N, change, hidden);
    normalise(&its->inner, B, N, hidden, change);
    share(multiply_inner, &all, num_parts(&its->gate), 1, threads_for(2 * I * N, B, threads));
    kvferry_multiply(&its->down, B, threads, scratch, change);
}

/* After the last layer: hidden and change [B, N], as above, to logits [B, V]. */
void kvferry_logits(const norm *last, const product *head, int64_t B, int64_t threads, float *hidden,
                    const float *change, float *logits) {
    add(B * head->columns, change, hidden);
    normalise(last, B, head->columns, hidden, hidden);
    kvferry_multiply(head, B, threads, hidden, logits);
}
