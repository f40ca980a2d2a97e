/* Which tokens a head attends to in hybrid sparse attention (kernels/hsa): the first two steps of Algorithm 1.
 *
 *   rank_channels ─► logits of pages, by the caller ─► share_pages ─► choose_tokens ─► attention to them
 */

#ifndef KVFERRY_SPARSE_H
#define KVFERRY_SPARSE_H

#include "attention.h"

/* Fields of a head's row in a table of heads, behind those of attention.h; as in kernels/hsa/batch.py. */
enum { MAX_OFFSET = LENGTH + 1, MIN_OFFSET, CHANNEL_STRIDE, PAGE_SIZE, NUM_CHANNELS, NUM_TOKENS };

/* Memory for one head. With G queries, p pages, k1 channels and k2 tokens:
 * queries [k1, G]; logits [G, p], of which LANES more may be read and written; shares [p]; ranks [max(p, D)];
 * taken [p]; chosen [k2]; channels, is_below [k1]. */
typedef struct {
    float *queries, *logits, *shares;
    int32_t *ranks, *taken, *chosen, *channels, *is_below;
    void *all;
} choice;

/* Returns 0, or NO_MEMORY. */
static int make_choice(int64_t G, int64_t D, int64_t pages, int64_t num_tokens, choice *its) {
    const size_t padded = (size_t)pages + LANES, num_ranks = (size_t)(pages > D ? pages : D);
    const size_t floats = (size_t)(D * G) + (size_t)G * padded + padded;
    const size_t ints = num_ranks + padded + (size_t)num_tokens + 2 * (size_t)D;
    its->all = malloc((floats + ints) * sizeof(float));
    if (!its->all) return NO_MEMORY;
    its->queries = its->all;
    its->logits = its->queries + D * G;
    its->shares = its->logits + (size_t)G * padded;
    its->ranks = (int32_t *)(its->shares + padded);
    its->taken = its->ranks + num_ranks;
    its->chosen = its->taken + padded;
    its->channels = its->chosen + num_tokens;
    its->is_below = its->channels + D;
    return 0;
}

/* An integer that orders as the score does. Scores that are not above 0 count as 0, and so do NaN and infinity,
 * because an order needs numbers. */
INLINE int32_t rank_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits > 0 && bits < 0x7f800000 ? bits : 0;
}

/* The `wanted`-th largest of at least as many ranks. */
static int32_t threshold_of(const int32_t *ranks, int64_t count, int64_t wanted) {
    int32_t found = 0;
    for (int bit = 30; bit >= 0; bit--) {
        const int32_t tried = found | (int32_t)1 << bit;
        int32_t reached = 0;
        for (int64_t i = 0; i < count; i++) reached += ranks[i] >= tried;
        if (reached >= wanted) found = tried;
    }
    return found;
}

/* Marks the `wanted` largest of `count` ranks, of equal ones the first, as 1 in taken, the others as 0. */
static void take_largest(const int32_t *ranks, int64_t count, int64_t wanted, int32_t *taken) {
    const int32_t threshold = threshold_of(ranks, count, wanted);
    int64_t left = wanted;
    for (int64_t i = 0; i < count; i++) left -= taken[i] = ranks[i] > threshold;
    for (int64_t i = 0; i < count && left; i++)
        if (ranks[i] == threshold) {
            taken[i] = 1;
            left--;
        }
}

/* The channels that count, and the queries [G, D] on them, times the softmax's scale over its temperature. With
 * `steps` [D] they are also multiplied by a channel's step. */
static void rank_channels(int64_t G, int64_t D, int64_t num_channels, float scaling, const float *queries,
                          const float *steps, choice *its) {
    for (int64_t c = 0; c < D; c++) {
        float magnitude = 0;
        for (int64_t g = 0; g < G; g++) magnitude += fabsf(queries[g * D + c]);
        its->ranks[c] = rank_of(magnitude);
    }
    take_largest(its->ranks, D, num_channels, its->is_below);
    for (int64_t c = 0, i = 0; c < D; c++)
        if (its->is_below[c]) its->channels[i++] = (int32_t)c;
    for (int64_t i = 0; i < num_channels; i++) {
        float total = 0;
        for (int64_t g = 0; g < G; g++) total += queries[g * D + its->channels[i]];
        its->is_below[i] = signbit(total) != 0;
    }
    for (int64_t g = 0; g < G; g++) {
        float kept = 1e-30f, all = 0;
        for (int64_t c = 0; c < D; c++) all += fabsf(queries[g * D + c]);
        for (int64_t i = 0; i < num_channels; i++) kept += fabsf(queries[g * D + its->channels[i]]);
        const float scale = scaling * sqrtf(all / kept);
        for (int64_t i = 0; i < num_channels; i++) {
            const int64_t c = its->channels[i];
            its->queries[i * G + g] = queries[g * D + c] * scale * (steps ? steps[c] : 1.0f);
        }
    }
}

/* Logits of pages of G queries from `first` on, by extremes of `size` bytes each (float32, or codes of 8 bits),
 * channel by channel. */
INLINE void score_pages(const int G, const int size, int64_t first, int64_t num_queries, int64_t num_channels,
                        int64_t num_pages, const uint8_t *highest, const uint8_t *lowest, int64_t stride,
                        choice *its) {
    const int64_t pitch = num_pages + LANES;
    for (int64_t page = 0; page < num_pages; page += LANES) {
        const size_t used = (size_t)(num_pages - page < LANES ? num_pages - page : LANES);
        lanes sums[4];
        for (int g = 0; g < G; g++) sums[g] = (lanes){0};
        for (int64_t i = 0; i < num_channels; i++) {
            const uint8_t *row = (its->is_below[i] ? lowest : highest) + (its->channels[i] * stride + page) * size;
            lanes extremes = {0};
            if (size == 1) {
                byte_lanes codes = {0};
                if (used == LANES)
                    memcpy(&codes, row, LANES);
                else
                    memcpy(&codes, row, used);
                extremes = __builtin_convertvector(__builtin_convertvector(codes, int_lanes), lanes);
            } else if (used == LANES) {
                memcpy(&extremes, row, sizeof extremes);
            } else {
                memcpy(&extremes, row, used * sizeof(float));
            }
            for (int g = 0; g < G; g++) sums[g] += extremes * its->queries[i * num_queries + first + g];
        }
        for (int g = 0; g < G; g++) store(its->logits + (first + g) * pitch + page, sums[g]);
    }
}

/* Logits [G, num_pages] to each page's share of a token: a softmax over tokens, whose sum over G orders as the
 * mean does. The same operations as in torch_path.py, and in floats as small, because pages far from the best one
 * still have an order. */
static void share_pages(int64_t G, int64_t length, int64_t page_size, choice *its) {
    const int64_t num_pages = (length + page_size - 1) / page_size, pitch = num_pages + LANES, last = num_pages - 1;
    const int64_t in_last = length - last * page_size;
    for (int64_t page = 0; page < num_pages; page++) its->shares[page] = 0;
    for (int64_t g = 0; g < G; g++) {
        float *logits = its->logits + g * pitch, largest = -INFINITY, total = 0, all = 1;
        if (in_last == 1) logits[last] -= logf((float)page_size); /* the newest token, whose share is not used */
        for (int64_t page = 0; page < num_pages; page++)
            if (!(logits[page] <= largest)) largest = logits[page];
        for (int64_t page = 0; page < num_pages; page++) total += logits[page] = expf(logits[page] - largest);
        if (1 < in_last && in_last < page_size)
            all = (float)page_size - (float)(page_size - in_last) * (logits[last] / total);
        for (int64_t page = 0; page < num_pages; page++) its->shares[page] += logits[page] / total / all;
    }
}

/* The newest of `length` tokens and the num_tokens - 1 best of the others by their pages' shares, ascending;
 * of equal ones the first. There are more than num_tokens. Returns how many. */
static int64_t choose_tokens(int64_t length, int64_t page_size, int64_t num_tokens, choice *its) {
    const int64_t others = length - 1, num_pages = (others + page_size - 1) / page_size;
    const int64_t in_last = others - (num_pages - 1) * page_size, wanted = num_tokens - 1;
    const int64_t full = wanted / page_size, rest = wanted - full * page_size;
    int64_t count = 0;
    for (int64_t page = 0; page < num_pages; page++) its->ranks[page] = rank_of(its->shares[page]);
    memset(its->taken, 0, (size_t)num_pages * sizeof *its->taken);
    if (full) take_largest(its->ranks, num_pages, full, its->taken);
    for (int64_t page = 0; page < num_pages; page++) its->taken[page] *= (int32_t)page_size;
    int64_t left = rest;
    if (its->taken[num_pages - 1]) {
        its->taken[num_pages - 1] = (int32_t)in_last; /* the last page may be short */
        left += page_size - in_last;
    }
    while (left) {
        int64_t next = -1;
        for (int64_t page = 0; page < num_pages; page++)
            if (!its->taken[page] && (next < 0 || its->ranks[page] > its->ranks[next])) next = page;
        const int64_t size = next == num_pages - 1 ? in_last : page_size;
        its->taken[next] = (int32_t)(left < size ? left : size);
        left -= its->taken[next];
    }
    for (int64_t page = 0; page < num_pages; page++)
        for (int32_t i = 0; i < its->taken[page]; i++) its->chosen[count++] = (int32_t)(page * page_size + i);
    its->chosen[count++] = (int32_t)(length - 1);
    return count;
}

/* Whether a head's sizes are numbers that kernels can divide and index by. */
INLINE int are_sizes(const int64_t *head, int64_t D) {
    return head[PAGE_SIZE] >= 1 && head[NUM_TOKENS] >= 1 && head[NUM_CHANNELS] >= 1 && head[NUM_CHANNELS] <= D;
}

/* Whether a head's extremes of `pages` pages are in a buffer of `size` numbers. */
INLINE int are_pages_inside(const int64_t *head, int64_t D, int64_t pages, int64_t size) {
    const int64_t stride = head[CHANNEL_STRIDE];
    if (stride < pages || stride > size / D) return 0;
    const int64_t last = size - (D - 1) * stride - pages;
    return head[MAX_OFFSET] >= 0 && head[MAX_OFFSET] <= last && head[MIN_OFFSET] >= 0 && head[MIN_OFFSET] <= last;
}

#endif
