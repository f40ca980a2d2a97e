/* What a decode step does on a CPU, in one thread, for float32 models like Llama: everything between two
 * attentions in one call, and dense attention. Weights that are float16 or bfloat16 numbers are read as such:
 * half the bytes, the same products.
 *
 * Compiled by the machine's own compiler when a process first needs it (`library.py`), for that machine.
 * All tensors are contiguous float32. B rows (one token each), N hidden size, H query heads, H_kv KV heads,
 * G = H / H_kv, D head_dim, I the MLP's inner size.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 8

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float half_lanes __attribute__((vector_size(2 * LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t short_lanes __attribute__((vector_size(2 * LANES)));

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

INLINE lanes load(const float *from) {
    lanes its;
    memcpy(&its, from, sizeof its);
    return its;
}

/* LANES weights from number `at` on. */
INLINE lanes load_weights(const int kind, const void *weight, int64_t at) {
    if (kind == FLOAT32) return load((const float *)weight + at);
    short_lanes its;
    memcpy(&its, (const uint16_t *)weight + at, sizeof its);
    if (kind == BFLOAT16) return (lanes)(__builtin_convertvector(its, int_lanes) << 16);
#ifdef __F16C__
    return (lanes)_mm256_cvtph_ps((__m128i)its);
#else
    return (lanes){0}; /* kvferry_kinds says that there is no such weight */
#endif
}

/* The kinds of weights that this machine reads, a bit for each. */
int kvferry_kinds(void) {
#ifdef __F16C__
    return 1 << FLOAT32 | 1 << BFLOAT16 | 1 << FLOAT16;
#else
    return 1 << FLOAT32 | 1 << BFLOAT16;
#endif
}

INLINE void store(float *to, lanes its) { memcpy(to, &its, sizeof its); }

INLINE float sum(lanes its) {
    half_lanes low, high;
    memcpy(&low, &its, sizeof low);
    memcpy(&high, (const char *)&its + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

/* e^x for x <= 88, to about 1 unit in the last place (Cephes' polynomial); 0 below -87, NaN for NaN. */
INLINE lanes exponential(lanes x) {
    const lanes zero = {0};
    int_lanes tiny = x < zero - 87.0f;
    lanes bounded = (lanes)((int_lanes)x & ~tiny); /* those lanes are 0 */
    lanes shifted = bounded * 1.44269504088896341f + 12582912.0f;
    lanes n = shifted - 12582912.0f; /* rounded to an integer */
    lanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int_lanes power = ((int_lanes)shifted - 0x4B400000 + 127) << 23;
    return (lanes)((int_lanes)(p * (lanes)power) & ~tiny);
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

/* Scores of R keys and G queries: scores [G, length], and their largest. */
INLINE void score(const int R, const int G, int64_t D, const float *queries, const float *key, float scaling,
                  float *scores, int64_t length, float *largest) {
    lanes sums[2][4];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) sums[r][g] = (lanes){0};
    for (int64_t i = 0; i < D; i += LANES) {
        lanes keys[2];
        for (int r = 0; r < R; r++) keys[r] = load(key + r * D + i);
        for (int g = 0; g < G; g++) {
            const lanes query = load(queries + g * D + i);
            for (int r = 0; r < R; r++) sums[r][g] += keys[r] * query;
        }
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) {
            const float its = sum(sums[r][g]) * scaling;
            scores[g * length + r] = its;
            if (!(its <= largest[g])) largest[g] = its; /* also if it is NaN */
        }
}

/* Weighted values of G queries, LANES channels. */
INLINE void weigh(const int G, int64_t D, const float *value, const float *weights, int64_t length,
                  const float *totals, float *output) {
    lanes sums[2][4];
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) sums[part][g] = (lanes){0};
    int64_t row = 0;
    for (; row + 2 <= length; row += 2, value += 2 * D)
        for (int part = 0; part < 2; part++) {
            const lanes values = load(value + part * D);
            for (int g = 0; g < G; g++) sums[part][g] += values * weights[g * length + row + part];
        }
    for (; row < length; row++, value += D)
        for (int g = 0; g < G; g++) sums[0][g] += load(value) * weights[g * length + row];
    for (int g = 0; g < G; g++) store(output + g * D, (sums[0][g] + sums[1][g]) / totals[g]);
}

/* Attention of G queries [G, D] to the rows of one KV head; weights is [G, length]. */
INLINE void attend_group(const int G, int64_t D, const float *queries, const float *keys, const float *values,
                         int64_t length, float scaling, float *weights, float *output) {
    float largest[4], totals[4];
    for (int g = 0; g < G; g++) largest[g] = -INFINITY;
    int64_t row = 0;
    for (; row + 2 <= length; row += 2)
        score(2, G, D, queries, keys + row * D, scaling, weights + row, length, largest);
    for (; row < length; row++)
        score(1, G, D, queries, keys + row * D, scaling, weights + row, length, largest);
    for (int g = 0; g < G; g++) {
        float *its = weights + g * length;
        lanes total = {0};
        for (row = 0; row + LANES <= length; row += LANES) {
            const lanes weight = exponential(load(its + row) - largest[g]);
            store(its + row, weight);
            total += weight;
        }
        totals[g] = sum(total);
        for (; row < length; row++) totals[g] += its[row] = expf(its[row] - largest[g]);
    }
    for (int64_t i = 0; i < D; i += LANES) weigh(G, D, values + i, weights, length, totals, output + i);
}

/* Append a row to each (sequence, KV head) of a batch and attend to all its rows.
 *
 * heads is a table [num_heads, fields] of the first K, the first V and the number of rows, the new one
 * included, as in descriptors.py; offsets count numbers from base, which has size of them. Row r of a head is
 * at r * D. Heads without rows get zeros. queries and output are [num_heads, G, D], keys and values
 * [num_heads, D]; D is a multiple of 8. Returns 0; 1: there is no memory for the scores; 2: a head's rows are
 * not in base. */
int kvferry_attend(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size,
                   int64_t G, int64_t D, const float *queries, const float *keys, const float *values,
                   float scaling, float *output) {
    int64_t longest = 0;
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t *its = heads + head * fields, length = its[2];
        if (length < 0 || length > size / D) return 2;
        for (int i = 0; i < 2; i++)
            if (length && (its[i] < 0 || its[i] > size - length * D)) return 2;
        if (length > longest) longest = length;
    }
    float *weights = longest ? malloc(4 * (size_t)longest * sizeof *weights) : NULL;
    if (longest && !weights) return 1;
    for (int64_t head = 0; head < num_heads; head++, heads += fields) {
        const int64_t length = heads[2];
        if (!length) {
            memset(output + head * G * D, 0, (size_t)(G * D) * sizeof *output);
            continue;
        }
        float *head_keys = base + heads[0], *head_values = base + heads[1];
        memcpy(head_keys + (length - 1) * D, keys + head * D, (size_t)D * sizeof *base);
        memcpy(head_values + (length - 1) * D, values + head * D, (size_t)D * sizeof *base);
        for (int64_t g = 0; g < G; g += 4) {
            const float *of_group = queries + (head * G + g) * D;
            float *into = output + (head * G + g) * D;
            if (G - g >= 4) attend_group(4, D, of_group, head_keys, head_values, length, scaling, weights, into);
            if (G - g == 3) attend_group(3, D, of_group, head_keys, head_values, length, scaling, weights, into);
            if (G - g == 2) attend_group(2, D, of_group, head_keys, head_values, length, scaling, weights, into);
            if (G - g == 1) attend_group(1, D, of_group, head_keys, head_values, length, scaling, weights, into);
        }
    }
    free(weights);
    return 0;
}
