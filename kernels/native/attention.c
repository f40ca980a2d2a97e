/* Dense attention of a decode step. */

#include "attention.h"

/* Append a row to each (sequence, KV head) of a batch and attend to all its rows.
 *
 * heads is a table [num_heads, fields] of the first K, the first V and the number of rows, the new one
 * included, as in descriptors.py; offsets count numbers from base, which has size of them. Row r of a head is
 * at r * D. Heads without rows get zeros. queries and output are [num_heads, G, D], keys and values
 * [num_heads, D]; D is a multiple of 8. Returns 0; NO_MEMORY: for the scores; OUTSIDE: a head's rows are not
 * in base. */
int kvferry_attend(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size,
                   int64_t G, int64_t D, const float *queries, const float *keys, const float *values,
                   float scaling, float *output) {
    const int64_t longest = longest_of(heads, num_heads, fields, size, D);
    if (longest < 0) return OUTSIDE;
    float *weights = longest ? malloc(4 * (size_t)longest * sizeof *weights) : NULL;
    if (longest && !weights) return NO_MEMORY;
    for (int64_t head = 0; head < num_heads; head++, heads += fields) {
        const int64_t length = heads[LENGTH];
        if (!length) {
            memset(output + head * G * D, 0, (size_t)(G * D) * sizeof *output);
            continue;
        }
        append(heads, D, base, keys + head * D, values + head * D);
        const float *head_keys = base + heads[KEY_OFFSET], *head_values = base + heads[VALUE_OFFSET];
#define ATTEND(N) \
    attend_group(N, D, queries + (head * G + first) * D, head_keys, head_values, NULL, length, scaling, weights, \
                 output + (head * G + first) * D)
        IN_GROUPS(G, ATTEND)
#undef ATTEND
    }
    free(weights);
    return 0;
}
