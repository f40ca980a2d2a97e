/* A head's packed rows (kernels/packed), and attention to them and to the new tokens' rows. */

#ifndef KVFERRY_PACKED_H
#define KVFERRY_PACKED_H

#include "attention.h"

/* Fields of a packed head's row: ENTRY_FIELDS of kernels/packed/layer.py. Offsets count int16s. */
enum {
    CHANNELS_OF_2 = 1,
    TOKENS_OF_2 = 5,
    KEY_WORDS = 9,
    CHANNELS,
    KEY_SCALES,
    KEY_MINIMA,
    VALUE_SCALES,
    VALUE_MINIMA,
    VALUES_OF_2,
    VALUES_OF_16 = VALUES_OF_2 + 3
};

/* Kinds of codes: the widths 2, 4, 8 and 16. */
enum { KINDS = 4, HALF = 3 };
/* Tokens that lie in one row of words, such rows' tokens in a block, and those that share scales of keys: half of
 * a block, or all of a last one that is as short. */
enum { ROW = 16, BLOCK = 8 * ROW, GROUP = BLOCK / 2 };

typedef struct {
    int64_t channels[KINDS], tokens[KINDS];
    int64_t num_channels, num_tokens, coded_channels, coded_tokens, num_groups;
    const uint16_t *words, *key_scales, *key_minima; /* scales and minima [num_groups, coded_channels] */
    const uint16_t *value_scales, *value_minima;
    const int16_t *numbers; /* of the channels */
    const uint8_t *values[KINDS];
} packed;

/* Which tokens attention is to; zeros mean all.
 *
 * needed: a flag for each row of eight in a block of packed tokens, whether its scores are needed.
 * chosen: the packed tokens, ascending; `stored` has their number, and their values as if there were no others.
 * rows: num_rows of the new tokens' rows (row_of). */
typedef struct {
    const uint8_t *needed;
    const int32_t *chosen;
    const packed *stored;
    const int32_t *rows;
    int64_t num_rows;
} tokens;

/* Memory for up to four queries; `weights` is what is to be freed. Queries in the order of a head's channels,
 * [4, D], and the same times a group's scales. */
typedef struct {
    float *ordered, *scaled, *weights;
    uint16_t *short_block;
} scratch;

/* Bytes of a token's values of one kind. */
INLINE int64_t value_bytes(const int kind, int64_t D) { return kind == HALF ? 2 * D : D << kind >> 2; }

/* A head's regions; returns 0, or OUTSIDE: one is not in codes [size bytes], or its numbers are wrong. */
int find_packed(const int64_t *entry, const uint8_t *codes, int64_t size, int64_t D, packed *its);

/* Memory for heads of at most so many packed and new tokens; returns 0, or NO_MEMORY. */
int make_scratch(int64_t num_tokens, int64_t D, scratch *its);

/* Attention of a head's queries [G, D]. */
void attend_packed(int64_t G, int64_t D, const packed *its, const tokens *which, const float *queries,
                   const float *keys, const float *values, float scaling, const scratch *memory, float *output);

#endif
