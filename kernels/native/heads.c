/* A step's attention, whose heads several threads share. */

#include <stdatomic.h>

#include "packed.h"
#include "threads.h"

/* Attention to fewer numbers of K and V is not worth another thread. */
enum { SHARED = 1 << 18 };

/* The functions kvferry_attend... of rows, and those of packed tokens and rows. */
typedef int (*to_rows)(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size, int64_t G,
                       int64_t D, const float *queries, const float *keys, const float *values, float scaling,
                       float *output);
typedef int (*to_packed)(const int64_t *heads, int64_t num_heads, int64_t fields, float *base, int64_t size,
                         const int64_t *entries, int64_t entry_fields, uint8_t *codes, int64_t code_bytes, int64_t G,
                         int64_t D, const float *queries, const float *keys, const float *values, float scaling,
                         float *output);

typedef struct {
    void *function;
    const int64_t *heads, *entries;
    int64_t fields, entry_fields, size, code_bytes, G, D;
    float *base;
    uint8_t *codes;
    const float *queries, *keys, *values;
    float scaling, *output;
    atomic_int failed;
} step;

static void attend_heads(void *work, int64_t first, int64_t end) {
    step *its = work;
    const int64_t *heads = its->heads + first * its->fields, row = first * its->D, group = row * its->G;
    const float *queries = its->queries + group, *keys = its->keys + row, *values = its->values + row;
    float *output = its->output + group;
    const int failed =
        its->entries
            ? ((to_packed)its->function)(heads, end - first, its->fields, its->base, its->size,
                                         its->entries + first * its->entry_fields, its->entry_fields, its->codes,
                                         its->code_bytes, its->G, its->D, queries, keys, values, its->scaling, output)
            : ((to_rows)its->function)(heads, end - first, its->fields, its->base, its->size, its->G, its->D, queries,
                                       keys, values, its->scaling, output);
    if (failed) atomic_store(&its->failed, failed);
}

/* Call a function for each head of a table, or for all at once; its arguments and result, with entries NULL for one
 * of rows. After a failure, rows of other heads may have been written. */
int kvferry_attend_in_threads(void *function, int64_t threads, const int64_t *heads, int64_t num_heads, int64_t fields,
                              float *base, int64_t size, const int64_t *entries, int64_t entry_fields, uint8_t *codes,
                              int64_t code_bytes, int64_t G, int64_t D, const float *queries, const float *keys,
                              const float *values, float scaling, float *output) {
    step its = {function, heads,   entries, fields, entry_fields, size,    code_bytes, G, D, base,
                codes,    queries, keys,    values, scaling,      output, 0};
    int64_t numbers = 0;
    for (int64_t head = 0; head < num_heads; head++) {
        numbers += 2 * D * heads[head * fields + LENGTH];
        for (int kind = 0; entries && kind < KINDS; kind++)
            numbers += 2 * D * entries[head * entry_fields + TOKENS_OF_2 + kind];
    }
    const int64_t most = numbers < SHARED ? 1 : threads;
    if (num_heads) share(attend_heads, &its, num_heads, most > 1 ? 1 : num_heads, most);
    return atomic_load(&its.failed);
}
