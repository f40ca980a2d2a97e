/* Attention of a decode step to packed rows: RDKV's mixed widths (kernels/packed), and the new tokens' rows.
 *
 * With k = s code + min per channel and group of tokens, q . k = sum of (s q) code + sum of min q: codes are
 * multiplied as they are, and the second sum is one number a query and group. Values likewise, by token. A code is
 * taken from its word or byte by a mask alone; that it is 2^shift times too large is undone once for each sum.
 */

#include "packed.h"

/* Rows of words that a block's channels before kind take, or all of them. */
INLINE int64_t rows_before(const packed *its, const int kind) {
    int64_t rows = 0;
    for (int k = 0; k < kind; k++) rows += its->channels[k] << k;
    return rows;
}

/* Up to LANES halves; zeros behind them. */
INLINE lanes some_halves(const uint16_t *from, int64_t count) {
    if (count >= LANES) return load_halves(from);
    uint16_t some[LANES] = {0};
    memcpy(some, from, (size_t)count * sizeof *some);
    return load_halves(some);
}

/* Queries [G, D] in the order of a head's channels, with zeros behind them. */
INLINE void order_queries(const packed *its, const int G, int64_t D, float scaling, const float *queries,
                          float *ordered) {
    for (int64_t c = 0; c < its->num_channels; c++) {
        const int64_t number = its->numbers[c] & (its->numbers[c] >= 0 && its->numbers[c] < D ? -1 : 0);
        for (int g = 0; g < G; g++) ordered[g * D + c] = queries[g * D + number] * scaling;
    }
    for (int g = 0; g < G; g++)
        for (int64_t c = its->num_channels; c < D; c++) ordered[g * D + c] = 0;
}

/* Ordered queries [G, D] times the scales of a group's channels, and what its minima add, [G]. */
INLINE void scale_queries(const packed *its, const int G, int64_t D, int64_t group, const float *ordered,
                          float *scaled, float *bias) {
    const int64_t coded = its->coded_channels;
    lanes sums[4];
    for (int g = 0; g < G; g++) sums[g] = (lanes){0};
    for (int64_t c = 0; c < coded; c += LANES) {
        const lanes scales = some_halves(its->key_scales + group * coded + c, coded - c);
        const lanes minima = some_halves(its->key_minima + group * coded + c, coded - c);
        for (int g = 0; g < G; g++) {
            const lanes query = load(ordered + g * D + c);
            store(scaled + g * D + c, query * scales);
            sums[g] += query * minima;
        }
    }
    for (int g = 0; g < G; g++) {
        bias[g] = sum(sums[g]);
        for (int64_t c = coded; c < its->num_channels; c++) scaled[g * D + c] = ordered[g * D + c];
    }
}

/* Add the products of one kind's channels and G scaled queries to sums [2, G], of one row of tokens of a block. */
INLINE void multiply_kind(const int kind, const packed *its, const int G, int64_t D, const int row,
                          const uint16_t *words, const float *scaled, lanes sums[2][4]) {
    const int64_t count = its->channels[kind];
    const int fields = 8 >> kind, shift = row % fields * (2 << kind);
    const uint16_t mask = (uint16_t)((kind == HALF ? 0 : (1 << (2 << kind)) - 1) << shift);
    lanes own[2][4];
    words += (rows_before(its, kind) + row / fields) * ROW;
    for (int k = 0; k < kind; k++) scaled += its->channels[k];
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) own[part][g] = (lanes){0};
    for (int64_t c = 0; c < count; c++, words += ROW << kind, scaled++) {
        lanes codes[2];
        for (int part = 0; part < 2; part++) {
            const uint16_t *from = words + part * LANES;
            if (kind == HALF) {
                codes[part] = load_halves(from);
            } else {
                short_lanes some;
                memcpy(&some, from, sizeof some);
                codes[part] = __builtin_convertvector(__builtin_convertvector(some & mask, int_lanes), lanes);
            }
        }
        for (int g = 0; g < G; g++)
            for (int part = 0; part < 2; part++) own[part][g] += codes[part] * scaled[g * D];
    }
    const float unit = 1.0f / (float)(1 << shift);
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) sums[part][g] += own[part][g] * unit;
}

/* Scores of a block's tokens, of which `lanes_used` stand in each of its eight rows; of the rows that are
 * needed, or of all. */
INLINE void score_block(const packed *its, const int G, int64_t D, int64_t block, const uint16_t *words,
                        int64_t lanes_used, const uint8_t *needed, const scratch *memory, float *scores,
                        int64_t pitch) {
    const float *scaled = memory->scaled;
    float bias[4];
    int64_t found = -1;
    for (int row = 0; row < 8; row++) {
        if (needed && !needed[row]) continue;
        const int64_t half = 2 * block + row / 4, group = half < its->num_groups ? half : half - 1;
        if (group != found) scale_queries(its, G, D, group, memory->ordered, memory->scaled, bias);
        found = group;
        lanes sums[2][4];
        float some[ROW];
        for (int part = 0; part < 2; part++)
            for (int g = 0; g < G; g++) sums[part][g] = (lanes){0} + bias[g];
        multiply_kind(0, its, G, D, row, words, scaled, sums);
        multiply_kind(1, its, G, D, row, words, scaled, sums);
        multiply_kind(2, its, G, D, row, words, scaled, sums);
        multiply_kind(HALF, its, G, D, row, words, scaled, sums);
        for (int g = 0; g < G; g++) {
            for (int part = 0; part < 2; part++) store(some + part * LANES, sums[part][g]);
            memcpy(scores + g * pitch + row * lanes_used, some, (size_t)lanes_used * sizeof *some);
        }
    }
}

/* Scores of packed tokens, [G, pitch], of the rows that are needed (see `tokens`). Up to 7 more are written behind
 * them. memory->short_block has room for a block's words. */
INLINE void score_packed(const packed *its, const int G, int64_t D, const uint8_t *needed, const scratch *memory,
                         float *scores, int64_t pitch) {
    const int64_t rows = rows_before(its, KINDS), full = its->num_tokens / BLOCK;
    uint16_t *short_block = memory->short_block;
    const uint16_t *words = its->words;
    for (int64_t block = 0; block < full; block++, words += rows * ROW)
        score_block(its, G, D, block, words, ROW, needed ? needed + 8 * block : NULL, memory,
                    scores + block * BLOCK, pitch);
    const int64_t rest = its->num_tokens - full * BLOCK, lanes_used = (rest + 7) / 8;
    if (!rest) return;
    for (int64_t row = 0; row < rows; row++)
        memcpy(short_block + row * ROW, words + row * lanes_used, (size_t)lanes_used * sizeof *words);
    score_block(its, G, D, full, short_block, lanes_used, needed ? needed + 8 * full : NULL, memory,
                scores + full * BLOCK, pitch);
}

/* Weights of tokens with codes times their scales, in place; and lowest [G], what their minima add. */
INLINE void scale_weights(const packed *its, const int G, float *weights, int64_t pitch, float *lowest) {
    lanes sums[4];
    for (int g = 0; g < G; g++) sums[g] = (lanes){0};
    for (int64_t token = 0; token < its->coded_tokens; token += LANES) {
        const int64_t left = its->coded_tokens - token;
        const lanes scales = some_halves(its->value_scales + token, left);
        const lanes minima = some_halves(its->value_minima + token, left);
        for (int g = 0; g < G; g++) {
            float *from = weights + g * pitch + token, some[LANES] = {0};
            const size_t size = (size_t)(left < LANES ? left : LANES) * sizeof *some;
            memcpy(some, from, size);
            sums[g] += load(some) * minima;
            store(some, load(some) * scales);
            memcpy(from, some, size);
        }
    }
    for (int g = 0; g < G; g++) lowest[g] = sum(sums[g]);
}

/* Add the weighted codes of count tokens to output [G, D]: of two groups of LANES bytes or halves of a row,
 * from each of which one field is taken. Group i's channels begin at into[i]. */
INLINE void weigh_fields(const int kind, const int G, int64_t count, const uint8_t *rows, int64_t row_bytes,
                         const int64_t from[2], const int shifts[2], const float *weights, int64_t pitch,
                         const int64_t into[2], float *output, int64_t D) {
    lanes sums[2][4];
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) sums[part][g] = (lanes){0};
    for (int64_t token = 0; token < count; token++, rows += row_bytes) {
        lanes codes[2];
        for (int part = 0; part < 2; part++) {
            if (kind == HALF) {
                codes[part] = load_halves((const uint16_t *)(const void *)(rows + from[part]));
            } else {
                byte_lanes some;
                memcpy(&some, rows + from[part], sizeof some);
                const uint8_t mask = (uint8_t)(((1 << (2 << kind)) - 1) << shifts[part]);
                codes[part] = __builtin_convertvector(__builtin_convertvector(some & mask, int_lanes), lanes);
            }
        }
        for (int g = 0; g < G; g++)
            for (int part = 0; part < 2; part++) sums[part][g] += codes[part] * weights[g * pitch + token];
    }
    for (int part = 0; part < 2; part++)
        for (int g = 0; g < G; g++) {
            float *to = output + g * D + into[part];
            store(to, load(to) + sums[part][g] * (1.0f / (float)(1 << shifts[part])));
        }
}

/* Add the weighted values of the tokens of one kind to output [G, D]. */
INLINE void weigh_kind(const int kind, const int G, int64_t D, int64_t count, const uint8_t *rows,
                       const float *weights, int64_t pitch, float *output) {
    const int64_t row_bytes = value_bytes(kind, D), size = kind == HALF ? 2 : 1;
    const int64_t chunk = LANES * size, stride = kind < 2 ? row_bytes : 0;
    if (!count) return;
    if (kind >= 2)
        for (int64_t i = 0; i < row_bytes; i += 2 * chunk)
            weigh_fields(kind, G, count, rows, row_bytes, (int64_t[2]){i, i + chunk}, (int[2]){0, 0}, weights,
                         pitch, (int64_t[2]){i / size, (i + chunk) / size}, output, D);
    if (kind == 1)
        for (int64_t i = 0; i < row_bytes; i += chunk)
            weigh_fields(kind, G, count, rows, row_bytes, (int64_t[2]){i, i}, (int[2]){0, 4}, weights, pitch,
                         (int64_t[2]){i, i + stride}, output, D);
    if (kind == 0)
        for (int64_t i = 0; i < row_bytes; i += chunk) {
            weigh_fields(kind, G, count, rows, row_bytes, (int64_t[2]){i, i}, (int[2]){0, 2}, weights, pitch,
                         (int64_t[2]){i, i + stride}, output, D);
            weigh_fields(kind, G, count, rows, row_bytes, (int64_t[2]){i, i}, (int[2]){4, 6}, weights, pitch,
                         (int64_t[2]){i + 2 * stride, i + 3 * stride}, output, D);
        }
}

INLINE void attend_some(const int G, int64_t D, const packed *its, const tokens *which, const float *queries,
                        const float *keys, const float *values, float scaling, const scratch *memory,
                        float *output) {
    const packed *stored = which->stored ? which->stored : its;
    const int64_t kept = stored->num_tokens, all = kept + which->num_rows;
    const int64_t pitch = its->num_tokens + which->num_rows + LANES;
    const float ones[4] = {1, 1, 1, 1};
    float largest[4], totals[4], lowest[4], *weights = memory->weights, *new_weights = weights + kept;
    order_queries(its, G, D, scaling, queries, memory->ordered);
    score_packed(its, G, D, which->needed, memory, weights, pitch);
    for (int g = 0; g < G; g++) {
        float *scores = weights + g * pitch;
        largest[g] = -INFINITY;
        for (int64_t token = 0; token < kept; token++) {
            const float one = scores[row_of(which->chosen, token)];
            scores[token] = one; /* chosen tokens ascend, so none is overwritten before it is read */
            largest[g] = one <= largest[g] ? largest[g] : one; /* also if it is NaN */
        }
    }
    for (int64_t row = 0; row < which->num_rows; row++) {
        const float *const key[1] = {keys + row_of(which->rows, row) * D};
        score(1, G, D, queries, key, scaling, new_weights + row, pitch, largest);
    }
    soften(G, all, pitch, largest, weights, totals);
    for (int64_t i = 0; i < D; i += LANES)
        weigh(G, D, values + i, which->rows, new_weights, pitch, which->num_rows, ones, output + i);
    scale_weights(stored, G, weights, pitch, lowest);
    const float *of_kind = weights;
    weigh_kind(0, G, D, stored->tokens[0], stored->values[0], of_kind, pitch, output);
    of_kind += stored->tokens[0];
    weigh_kind(1, G, D, stored->tokens[1], stored->values[1], of_kind, pitch, output);
    of_kind += stored->tokens[1];
    weigh_kind(2, G, D, stored->tokens[2], stored->values[2], of_kind, pitch, output);
    of_kind += stored->tokens[2];
    weigh_kind(HALF, G, D, stored->tokens[HALF], stored->values[HALF], of_kind, pitch, output);
    for (int g = 0; g < G; g++)
        for (int64_t i = 0; i < D; i += LANES) {
            float *to = output + g * D + i;
            store(to, (load(to) + lowest[g]) / totals[g]);
        }
}

void attend_packed(int64_t G, int64_t D, const packed *its, const tokens *which, const float *queries,
                   const float *keys, const float *values, float scaling, const scratch *memory, float *output) {
#define ATTEND(N) \
    attend_some(N, D, its, which, queries + first * D, keys, values, scaling, memory, output + first * D)
    IN_GROUPS(G, ATTEND)
#undef ATTEND
}

int find_packed(const int64_t *entry, const uint8_t *codes, int64_t size, int64_t D, packed *its) {
    *its = (packed){0};
    for (int kind = 0; kind < KINDS; kind++) {
        its->channels[kind] = entry[CHANNELS_OF_2 + kind];
        its->tokens[kind] = entry[TOKENS_OF_2 + kind];
        if (its->channels[kind] < 0 || its->channels[kind] > D) return OUTSIDE;
        if (its->tokens[kind] < 0 || its->tokens[kind] > size) return OUTSIDE;
        its->num_channels += its->channels[kind];
        its->num_tokens += its->tokens[kind];
    }
    if (its->num_channels > D) return OUTSIDE;
    its->coded_tokens = its->num_tokens - its->tokens[HALF];
    its->coded_channels = its->num_channels - its->channels[HALF];
    its->num_groups = (its->num_tokens + GROUP - 1) / GROUP;
    const int64_t word_bytes = (its->num_tokens + 7) / 8 * 2 * rows_before(its, KINDS);
    const int64_t header_bytes = 2 * its->num_groups * its->coded_channels;
    const int64_t sizes[] = {
        word_bytes, 2 * its->num_channels, header_bytes, header_bytes, 2 * its->coded_tokens,
        2 * its->coded_tokens, its->tokens[0] * value_bytes(0, D), its->tokens[1] * value_bytes(1, D),
        its->tokens[2] * value_bytes(2, D), its->tokens[HALF] * value_bytes(HALF, D),
    };
    const uint8_t *regions[VALUES_OF_16 - KEY_WORDS + 1];
    for (int i = 0; i <= VALUES_OF_16 - KEY_WORDS; i++) {
        const int64_t at = entry[KEY_WORDS + i];
        if (sizes[i] && (at < 0 || at > size / 2 || sizes[i] > size - 2 * at)) return OUTSIDE;
        regions[i] = codes + (sizes[i] ? 2 * at : 0);
    }
    its->words = (const uint16_t *)(const void *)regions[0];
    its->numbers = (const int16_t *)(const void *)regions[CHANNELS - KEY_WORDS];
    its->key_scales = (const uint16_t *)(const void *)regions[KEY_SCALES - KEY_WORDS];
    its->key_minima = (const uint16_t *)(const void *)regions[KEY_MINIMA - KEY_WORDS];
    its->value_scales = (const uint16_t *)(const void *)regions[VALUE_SCALES - KEY_WORDS];
    its->value_minima = (const uint16_t *)(const void *)regions[VALUE_MINIMA - KEY_WORDS];
    for (int kind = 0; kind < KINDS; kind++) its->values[kind] = regions[VALUES_OF_2 - KEY_WORDS + kind];
    return 0;
}

int make_scratch(int64_t num_tokens, int64_t D, scratch *its) {
    const size_t num_weights = 4 * (size_t)(num_tokens + LANES), num_queries = 4 * (size_t)D;
    const size_t short_block = (size_t)(8 * D * ROW);
    float *all = malloc((num_weights + 2 * num_queries) * sizeof *all + short_block * sizeof(uint16_t));
    if (!all) return NO_MEMORY;
    float *ordered = all + num_weights, *scaled = ordered + num_queries;
    *its = (scratch){ordered, scaled, all, (uint16_t *)(void *)(scaled + num_queries)};
    return 0;
}

/* As kvferry_attend, to packed tokens as well: entries is a table [num_heads, entry_fields], and their offsets
 * count int16s from codes, which has code_bytes. D is a multiple of 32. */
int kvferry_attend_packed(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size,
                          const int64_t *entries, int64_t entry_fields, const uint8_t *codes,
                          int64_t code_bytes, int64_t G, int64_t D, const float *queries, const float *keys,
                          const float *values, float scaling, float *output) {
    const int64_t longest = longest_of(heads, num_heads, fields, size, D);
    int64_t most_tokens = 0;
    packed its;
    if (longest < 0) return OUTSIDE;
    for (int64_t head = 0; head < num_heads; head++) {
        if (!heads[head * fields + LENGTH]) continue;
        if (find_packed(entries + head * entry_fields, codes, code_bytes, D, &its)) return OUTSIDE;
        if (its.num_tokens > most_tokens) most_tokens = its.num_tokens;
    }
    scratch memory;
    if (make_scratch(most_tokens + longest, D, &memory)) return NO_MEMORY;
    for (int64_t head = 0; head < num_heads; head++, heads += fields, entries += entry_fields) {
        const int64_t length = heads[LENGTH];
        float *into = output + head * G * D;
        if (!length) {
            memset(into, 0, (size_t)(G * D) * sizeof *output);
            continue;
        }
        append(heads, D, base, keys + head * D, values + head * D);
        find_packed(entries, codes, code_bytes, D, &its);
        const tokens all = {.num_rows = length};
        const float *k = base + heads[KEY_OFFSET], *v = base + heads[VALUE_OFFSET];
        attend_packed(G, D, &its, &all, queries + head * G * D, k, v, scaling, &memory, into);
    }
    free(memory.weights);
    return 0;
}
