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
 * keys [max(p, D)]; queries [k1, G]; logits [G, p], of which LANES more may be read and written; shares [p];
 * taken [p]; chosen [k2]; channels, is_below [k1]. */
typedef struct {
    uint64_t *keys;
    float *queries, *logits, *shares;
    int32_t *taken, *chosen, *channels, *is_below;
    void *all;
} choice;

/* Returns 0, or NO_MEMORY. */
static int make_choice(int64_t G, int64_t D, int64_t pages, int64_t num_tokens, choice *its) {
    const size_t num_keys = (size_t)(pages > D ? pages : D), padded = (size_t)pages + LANES;
    const size_t floats = (size_t)(D * G) + (size_t)G * padded + padded;
    const size_t ints = padded + (size_t)num_tokens + 2 * (size_t)D;
    its->all = malloc(num_keys * sizeof(uint64_t) + (floats + ints) * sizeof(float));
    if (!its->all) return NO_MEMORY;
    its->keys = its->all;
    its->queries = (float *)(its->keys + num_keys);
    its->logits = its->queries + D * G;
    its->shares = its->logits + (size_t)G * padded;
    its->taken = (int32_t *)(its->shares + padded);
    its->chosen = its->taken + padded;
    its->channels = its->chosen + num_tokens;
    its->is_below = its->channels + D;
    return 0;
}

/* Orders as the score does, and equal scores by the lower index first. Scores that are not above 0 count as 0,
 * and so do NaN and infinity, because an order needs numbers. */
INLINE uint64_t order_key(float score, int64_t index) {
    uint32_t bits = 0;
    if (score > 0 && score < INFINITY) memcpy(&bits, &score, sizeof bits);
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)index;
}

INLINE int64_t index_of(uint64_t key) { return (int64_t)(uint32_t)~(uint32_t)key; }

static int falling(const void *a, const void *b) {
    const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left < right) - (left > right);
}

/* Move the `wanted` largest of different keys to the front, the largest first. */
static void select_largest(uint64_t *keys, int64_t count, int64_t wanted) {
    int64_t begin = 0, end = count;
    while (wanted > begin && wanted < end) {
        const uint64_t a = keys[begin], b = keys[begin + (end - begin) / 2], c = keys[end - 1];
        const uint64_t pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t left = begin, right = end - 1;
        while (left <= right) {
            while (keys[left] > pivot) left++;
            while (keys[right] < pivot) right--;
            if (left > right) break;
            const uint64_t its = keys[left];
            keys[left++] = keys[right];
            keys[right--] = its;
        }
        if (wanted <= right + 1)
            end = right + 1;
        else
            begin = left; /* those between are the pivot, if there are any */
    }
    qsort(keys, (size_t)wanted, sizeof *keys, falling);
}

/* The channels that count, and the queries [G, D] on them, times the softmax's scale over its temperature. With
 * `steps` [D] they are also multiplied by a channel's step. */
static void rank_channels(int64_t G, int64_t D, int64_t num_channels, float scaling, const float *queries,
                          const float *steps, choice *its) {
    for (int64_t c = 0; c < D; c++) {
        float magnitude = 0;
        for (int64_t g = 0; g < G; g++) magnitude += fabsf(queries[g * D + c]);
        its->keys[c] = order_key(magnitude, c);
    }
    select_largest(its->keys, D, num_channels);
    for (int64_t i = 0; i < num_channels; i++) {
        const int64_t c = index_of(its->keys[i]);
        float total = 0;
        for (int64_t g = 0; g < G; g++) total += queries[g * D + c];
        its->channels[i] = (int32_t)c;
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
 * mean does. */
static void share_pages(int64_t G, int64_t length, int64_t page_size, choice *its) {
    const int64_t num_pages = (length + page_size - 1) / page_size, pitch = num_pages + LANES;
    const float missing = (float)(num_pages * page_size - length);
    for (int64_t page = 0; page < num_pages; page++) its->shares[page] = 0;
    for (int64_t g = 0; g < G; g++) {
        float *logits = its->logits + g * pitch, largest = -INFINITY, total;
        for (int64_t page = 0; page < num_pages; page++)
            if (!(logits[page] <= largest)) largest = logits[page];
        soften(1, num_pages, pitch, &largest, logits, &total);
        const float share = 1.0f / ((float)page_size * total - missing * logits[num_pages - 1]);
        for (int64_t page = 0; page < num_pages; page++) its->shares[page] += logits[page] * share;
    }
}

/* The newest of `length` tokens and the num_tokens - 1 best of the others by their pages' shares, ascending;
 * of equal ones the first. There are more than num_tokens. Returns how many. */
static int64_t choose_tokens(int64_t length, int64_t page_size, int64_t num_tokens, choice *its) {
    const int64_t others = length - 1, num_pages = (others + page_size - 1) / page_size;
    const int64_t in_last = others - (num_pages - 1) * page_size;
    int64_t left = num_tokens - 1, best = (left + page_size - 1) / page_size + 1, count = 0;
    if (best > num_pages) best = num_pages; /* one more, because the last page may be short */
    for (int64_t page = 0; page < num_pages; page++) its->keys[page] = order_key(its->shares[page], page);
    select_largest(its->keys, num_pages, best);
    memset(its->taken, 0, (size_t)num_pages * sizeof *its->taken);
    for (int64_t i = 0; i < best && left; i++) {
        const int64_t page = index_of(its->keys[i]), size = page == num_pages - 1 ? in_last : page_size;
        its->taken[page] = (int32_t)(left < size ? left : size);
        left -= its->taken[page];
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
