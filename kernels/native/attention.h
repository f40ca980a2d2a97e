/* What the attentions of a decode step share. D is a multiple of LANES, and a constant G is at most 4. */

#ifndef KVFERRY_ATTENTION_H
#define KVFERRY_ATTENTION_H

#include "lanes.h"

/* What the functions below return instead of 0. */
enum { NO_MEMORY = 1, OUTSIDE = 2 };

/* Fields of a head's row in a table of heads; as in descriptors.py. */
enum { KEY_OFFSET, VALUE_OFFSET, LENGTH };

/* Calls CALL(1) to CALL(4), by how many of a head's queries are left from `first` on, until none is. */
#define IN_GROUPS(NUMBER, CALL) \
    for (int64_t first = 0; first < (NUMBER); first += 4) { \
        if ((NUMBER) - first >= 4) CALL(4); \
        if ((NUMBER) - first == 3) CALL(3); \
        if ((NUMBER) - first == 2) CALL(2); \
        if ((NUMBER) - first == 1) CALL(1); \
    }

/* The number of the i-th row: of those listed, or of all rows where there is no list. */
INLINE int64_t row_of(const int32_t *rows, int64_t i) { return rows ? rows[i] : i; }

/* Scores of R keys and G queries: scores [G, pitch], and their largest. */
INLINE void score(const int R, const int G, int64_t D, const float *queries, const float *const *key,
                  float scaling, float *scores, int64_t pitch, float *largest) {
    lanes sums[2][4];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) sums[r][g] = (lanes){0};
    for (int64_t i = 0; i < D; i += LANES) {
        lanes keys[2];
        for (int r = 0; r < R; r++) keys[r] = load(key[r] + i);
        for (int g = 0; g < G; g++) {
            const lanes query = load(queries + g * D + i);
            for (int r = 0; r < R; r++) sums[r][g] += keys[r] * query;
        }
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) {
            const float its = sum(sums[r][g]) * scaling;
            scores[g * pitch + r] = its;
            if (!(its <= largest[g])) largest[g] = its; /* also if it is NaN */
        }
}

/* Weighted values of G queries, LANES channels of `length` rows (row_of):
 * output = sum of weights [G, pitch] times values, over totals. */
INLINE void weigh(const int G, int64_t D, const float *values, const int32_t *rows, const float *weights,
                  int64_t pitch, int64_t length, const float *totals, float *output) {
    lanes sums[2][4];
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) sums[part][g] = (lanes){0};
    int64_t row = 0;
    for (; row + 2 <= length; row += 2)
        for (int part = 0; part < 2; part++) {
            const lanes value = load(values + row_of(rows, row + part) * D);
            for (int g = 0; g < G; g++) sums[part][g] += value * weights[g * pitch + row + part];
        }
    for (; row < length; row++)
        for (int g = 0; g < G; g++) sums[0][g] += load(values + row_of(rows, row) * D) * weights[g * pitch + row];
    for (int g = 0; g < G; g++) store(output + g * D, (sums[0][g] + sums[1][g]) / totals[g]);
}

/* Scores [G, pitch] to their exponentials relative to the largest, and the sums of these. */
INLINE void soften(const int G, int64_t length, int64_t pitch, const float *largest, float *scores, float *totals) {
    for (int g = 0; g < G; g++) {
        float *its = scores + g * pitch;
        lanes total = {0};
        int64_t row = 0;
        for (; row + LANES <= length; row += LANES) {
            const lanes weight = exponential(load(its + row) - largest[g]);
            store(its + row, weight);
            total += weight;
        }
        totals[g] = sum(total);
        for (; row < length; row++) totals[g] += its[row] = expf(its[row] - largest[g]);
    }
}

/* Attention of G queries [G, D] to `length` rows (row_of) of one KV head; weights is [G, length]. */
INLINE void attend_group(const int G, int64_t D, const float *queries, const float *keys, const float *values,
                         const int32_t *rows, int64_t length, float scaling, float *weights, float *output) {
    float largest[4], totals[4];
    for (int g = 0; g < G; g++) largest[g] = -INFINITY;
    int64_t row = 0;
    for (; row + 2 <= length; row += 2) {
        const float *const both[2] = {keys + row_of(rows, row) * D, keys + row_of(rows, row + 1) * D};
        score(2, G, D, queries, both, scaling, weights + row, length, largest);
    }
    for (; row < length; row++) {
        const float *const one[1] = {keys + row_of(rows, row) * D};
        score(1, G, D, queries, one, scaling, weights + row, length, largest);
    }
    soften(G, length, length, largest, weights, totals);
    for (int64_t i = 0; i < D; i += LANES)
        weigh(G, D, values + i, rows, weights, length, length, totals, output + i);
}

/* The number of rows of the longest head, or -1: a head's rows are not in the buffer of `size` numbers. */
static int64_t longest_of(const int64_t *heads, int64_t num_heads, int64_t fields, int64_t size, int64_t D) {
    int64_t longest = 0;
    for (int64_t head = 0; head < num_heads; head++) {
        const int64_t *its = heads + head * fields, length = its[LENGTH];
        if (length < 0 || length > size / D) return -1;
        for (int i = KEY_OFFSET; i <= VALUE_OFFSET; i++)
            if (length && (its[i] < 0 || its[i] > size - length * D)) return -1;
        if (length > longest) longest = length;
    }
    return longest;
}

/* Write a head's new row, its last one. */
static void append(const int64_t *head, int64_t D, float *base, const float *key, const float *value) {
    const int64_t last = (head[LENGTH] - 1) * D;
    memcpy(base + head[KEY_OFFSET] + last, key, (size_t)D * sizeof *base);
    memcpy(base + head[VALUE_OFFSET] + last, value, (size_t)D * sizeof *base);
}

#endif
