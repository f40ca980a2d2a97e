/* Hybrid sparse attention of a decode step to packed tokens, whose pages' extremes are codes of 8 bits. */

#include "packed.h"
#include "sparse.h"

/* Fields of a head's row behind those of sparse.h: each channel's range, float32 [D] each in base. MAX_OFFSET,
 * MIN_OFFSET and CHANNEL_STRIDE count bytes in codes. */
enum { LOW_OFFSET = NUM_TOKENS + 1, STEP_OFFSET };

/* Fold a head's new key, its token number `position`, into its page's extremes. */
static void fold_codes(const int64_t *head, int64_t D, const float *base, uint8_t *codes, int64_t position,
                       const float *key) {
    const int64_t page = position / head[PAGE_SIZE], stride = head[CHANNEL_STRIDE];
    uint8_t *highest = codes + head[MAX_OFFSET] + page, *lowest = codes + head[MIN_OFFSET] + page;
    const float *low = base + head[LOW_OFFSET], *step = base + head[STEP_OFFSET];
    const int is_first = position % head[PAGE_SIZE] == 0;
    for (int64_t c = 0; c < D; c++, highest += stride, lowest += stride) {
        const float its = step[c] > 0 ? nearbyintf((key[c] - low[c]) / step[c]) : 0;
        const uint8_t code = its > 0 ? (uint8_t)(its < 255 ? its : 255) : 0;
        if (is_first || code > *highest) *highest = code;
        if (is_first || code < *lowest) *lowest = code;
    }
}

/* A head's chosen packed tokens, as `tokens` needs them; `needed` is what is to be freed. */
typedef struct {
    uint8_t *needed, *values;
    uint16_t *scales, *minima;
    packed stored;
} compact;

/* Returns 0, or NO_MEMORY. */
static int make_compact(int64_t num_tokens, int64_t num_chosen, int64_t D, compact *its) {
    const size_t flags = (size_t)(num_tokens / BLOCK + 1) * 8, halves = (size_t)num_chosen * sizeof(uint16_t);
    its->needed = malloc(flags + 2 * halves + (size_t)num_chosen * (size_t)value_bytes(HALF, D));
    if (!its->needed) return NO_MEMORY;
    its->scales = (uint16_t *)(void *)(its->needed + flags);
    its->minima = its->scales + num_chosen;
    its->values = (uint8_t *)(its->minima + num_chosen);
    return 0;
}

/* Copy the values of chosen tokens, ascending, and mark the rows of their keys. */
static void gather(const packed *all, int64_t D, const int32_t *chosen, int64_t count, compact *its) {
    const int64_t full = all->num_tokens / BLOCK, in_last = (all->num_tokens - full * BLOCK + 7) / 8;
    int64_t begin = 0, end = 0, i = 0;
    uint8_t *to = its->values;
    its->stored = (packed){.value_scales = its->scales, .value_minima = its->minima};
    memset(its->needed, 0, (size_t)(full + 1) * 8);
    for (int kind = 0; kind < KINDS; kind++, begin = end) {
        const int64_t size = value_bytes(kind, D);
        end += all->tokens[kind];
        its->stored.values[kind] = to;
        for (; i < count && chosen[i] < end; i++, to += size) {
            const int64_t token = chosen[i], block = token / BLOCK;
            its->needed[block * 8 + (token - block * BLOCK) / (block < full ? ROW : in_last)] = 1;
            memcpy(to, all->values[kind] + (token - begin) * size, (size_t)size);
            if (kind < HALF) {
                its->scales[i] = all->value_scales[token];
                its->minima[i] = all->value_minima[token];
            }
            its->stored.tokens[kind]++;
        }
    }
    its->stored.num_tokens = count;
    its->stored.coded_tokens = count - its->stored.tokens[HALF];
}

/* As kvferry_attend_packed, to the tokens that each head chooses of its packed ones and the rows behind them.
 * The new key is folded into its page's extremes, so codes are written, too. */
int kvferry_attend_packed_sparse(const int64_t *heads, int64_t num_heads, int64_t fields, float *base,
                                 int64_t size, const int64_t *entries, int64_t entry_fields, uint8_t *codes,
                                 int64_t code_bytes, int64_t G, int64_t D, const float *queries,
                                 const float *keys, const float *values, float scaling, float *output) {
    const int64_t longest = longest_of(heads, num_heads, fields, size, D);
    int64_t most_pages = 0, most_chosen = 0, most_tokens = 0;
    packed its;
    if (longest < 0) return OUTSIDE;
    for (int64_t n = 0; n < num_heads; n++) {
        const int64_t *head = heads + n * fields;
        if (!head[LENGTH]) continue;
        if (find_packed(entries + n * entry_fields, codes, code_bytes, D, &its)) return OUTSIDE;
        if (!are_sizes(head, D)) return OUTSIDE;
        const int64_t all = its.num_tokens + head[LENGTH], pages = (all + head[PAGE_SIZE] - 1) / head[PAGE_SIZE];
        if (!are_pages_inside(head, D, pages, code_bytes)) return OUTSIDE;
        for (int i = LOW_OFFSET; i <= STEP_OFFSET; i++)
            if (head[i] < 0 || head[i] > size - D) return OUTSIDE;
        if (pages > most_pages) most_pages = pages;
        if (all > most_tokens) most_tokens = all;
        if (all > head[NUM_TOKENS] && head[NUM_TOKENS] > most_chosen) most_chosen = head[NUM_TOKENS];
    }
    choice choosing;
    scratch memory;
    compact some = {0};
    if (make_choice(G, D, most_pages, most_chosen, &choosing)) return NO_MEMORY;
    int failed = make_scratch(most_tokens, D, &memory);
    if (!failed && make_compact(most_tokens, most_chosen, D, &some)) {
        free(memory.weights);
        failed = NO_MEMORY;
    }
    if (failed) {
        free(choosing.all);
        return failed;
    }
    for (int64_t n = 0; n < num_heads; n++, heads += fields, entries += entry_fields) {
        const int64_t num_rows = heads[LENGTH], page_size = heads[PAGE_SIZE];
        const float *q = queries + n * G * D, *key = keys + n * D;
        float *into = output + n * G * D;
        if (!num_rows) {
            memset(into, 0, (size_t)(G * D) * sizeof *output);
            continue;
        }
        find_packed(entries, codes, code_bytes, D, &its);
        const int64_t length = its.num_tokens + num_rows;
        append(heads, D, base, key, values + n * D);
        fold_codes(heads, D, base, codes, length - 1, key);
        tokens which = {.num_rows = num_rows};
        if (length > heads[NUM_TOKENS]) {
            rank_channels(G, D, heads[NUM_CHANNELS], scaling, q, base + heads[STEP_OFFSET], &choosing);
            const int64_t pages = (length + page_size - 1) / page_size;
            const uint8_t *highest = codes + heads[MAX_OFFSET], *lowest = codes + heads[MIN_OFFSET];
#define SCORE(N) \
    score_pages(N, 1, first, G, heads[NUM_CHANNELS], pages, highest, lowest, heads[CHANNEL_STRIDE], &choosing)
            IN_GROUPS(G, SCORE)
#undef SCORE
            share_pages(G, length, page_size, &choosing);
            const int64_t count = choose_tokens(length, page_size, heads[NUM_TOKENS], &choosing);
            int64_t kept = 0;
            while (kept < count && choosing.chosen[kept] < its.num_tokens) kept++;
            for (int64_t i = kept; i < count; i++) choosing.chosen[i] -= (int32_t)its.num_tokens;
            gather(&its, D, choosing.chosen, kept, &some);
            which = (tokens){some.needed, choosing.chosen, &some.stored, choosing.chosen + kept, count - kept};
        }
        const float *k = base + heads[KEY_OFFSET], *v = base + heads[VALUE_OFFSET];
        attend_packed(G, D, &its, &which, q, k, v, scaling, &memory, into);
    }
    free(some.needed);
    free(memory.weights);
    free(choosing.all);
    return 0;
}
