/* Hybrid sparse attention of a decode step to rows. */

#include "sparse.h"

/* Pages of one token have no extremes: their keys are read. */
static void score_rows(int64_t G, int64_t D, const int64_t *head, const float *keys, float *wide, choice *its) {
    const int64_t length = head[LENGTH], pitch = length + LANES;
    memset(wide, 0, (size_t)(G * D) * sizeof *wide);
    for (int64_t i = 0; i < head[NUM_CHANNELS]; i++)
        for (int64_t g = 0; g < G; g++) wide[g * D + its->channels[i]] = its->queries[i * G + g];
    float largest[4] = {0};
    for (int64_t row = 0; row < length; row += 2) {
        /* the last row of an odd number is read twice, and its second score is not used */
        const float *const key[2] = {keys + row * D, keys + (row + 1 < length ? row + 1 : row) * D};
#define SCORE(N) score(2, N, D, wide + first * D, key, 1.0f, its->logits + first * pitch + row, pitch, largest)
        IN_GROUPS(G, SCORE)
#undef SCORE
    }
}

/* Fold a head's new key into its page's extremes. */
static void fold_key(const int64_t *head, int64_t D, float *base, const float *key) {
    const int64_t row = head[LENGTH] - 1, page = row / head[PAGE_SIZE], stride = head[CHANNEL_STRIDE];
    float *highest = base + head[MAX_OFFSET] + page, *lowest = base + head[MIN_OFFSET] + page;
    const int is_first = row % head[PAGE_SIZE] == 0;
    for (int64_t c = 0; c < D; c++, highest += stride, lowest += stride) {
        /* NaN stays, as with torch.maximum */
        if (is_first || !(key[c] <= *highest)) *highest = is_first || *highest == *highest ? key[c] : *highest;
        if (is_first || !(key[c] >= *lowest)) *lowest = is_first || *lowest == *lowest ? key[c] : *lowest;
    }
}

/* The most pages and tokens of a head; 0, or OUTSIDE: one's sizes or extremes are wrong. */
static int largest_of(const int64_t *heads, int64_t num_heads, int64_t fields, int64_t D, int64_t size,
                      int64_t *most_pages, int64_t *most_tokens) {
    for (int64_t head = 0; head < num_heads; head++, heads += fields) {
        if (!heads[LENGTH]) continue;
        if (!are_sizes(heads, D)) return OUTSIDE;
        const int64_t pages = (heads[LENGTH] + heads[PAGE_SIZE] - 1) / heads[PAGE_SIZE];
        if (heads[PAGE_SIZE] > 1 && !are_pages_inside(heads, D, pages, size)) return OUTSIDE;
        if (pages > *most_pages) *most_pages = pages;
        if (heads[LENGTH] > heads[NUM_TOKENS] && heads[NUM_TOKENS] > *most_tokens) *most_tokens = heads[NUM_TOKENS];
    }
    return 0;
}

/* As kvferry_attend, to the tokens that each head chooses; the table has the fields of sparse.h, too. The new
 * key is folded into its page's extremes. A head with at most NUM_TOKENS rows attends to all. */
int kvferry_attend_sparse(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size,
                          int64_t G, int64_t D, const float *queries, const float *keys, const float *values,
                          float scaling, float *output) {
    const int64_t longest = longest_of(heads, num_heads, fields, size, D);
    int64_t most_pages = 0, most_tokens = 0;
    if (longest < 0) return OUTSIDE;
    if (largest_of(heads, num_heads, fields, D, size, &most_pages, &most_tokens)) return OUTSIDE;
    choice its;
    if (make_choice(G, D, most_pages, most_tokens, &its)) return NO_MEMORY;
    float *weights = malloc((size_t)(4 * longest + G * D) * sizeof *weights);
    if (!weights) {
        free(its.all);
        return NO_MEMORY;
    }
    float *wide = weights + 4 * longest;
    for (int64_t head = 0; head < num_heads; head++, heads += fields) {
        const int64_t length = heads[LENGTH], page_size = heads[PAGE_SIZE];
        const float *q = queries + head * G * D;
        float *into = output + head * G * D;
        if (!length) {
            memset(into, 0, (size_t)(G * D) * sizeof *output);
            continue;
        }
        append(heads, D, base, keys + head * D, values + head * D);
        if (page_size > 1) fold_key(heads, D, base, keys + head * D);
        const float *k = base + heads[KEY_OFFSET], *v = base + heads[VALUE_OFFSET];
        int64_t count = length;
        const int32_t *chosen = NULL;
        if (length > heads[NUM_TOKENS]) {
            rank_channels(G, D, heads[NUM_CHANNELS], scaling, q, NULL, &its);
            const int64_t pages = (length + page_size - 1) / page_size;
            const uint8_t *highest = (const uint8_t *)(base + heads[MAX_OFFSET]);
            const uint8_t *lowest = (const uint8_t *)(base + heads[MIN_OFFSET]);
#define SCORE(N) \
    score_pages(N, sizeof(float), first, G, heads[NUM_CHANNELS], pages, highest, lowest, heads[CHANNEL_STRIDE], &its)
            if (page_size == 1)
                score_rows(G, D, heads, k, wide, &its);
            else
                IN_GROUPS(G, SCORE)
#undef SCORE
            share_pages(G, length, page_size, &its);
            count = choose_tokens(length, page_size, heads[NUM_TOKENS], &its);
            chosen = its.chosen;
        }
#define ATTEND(N) attend_group(N, D, q + first * D, k, v, chosen, count, scaling, weights, into + first * D)
        IN_GROUPS(G, ATTEND)
#undef ATTEND
    }
    free(weights);
    free(its.all);
    return 0;
}
