/* Products of float32 rows and a linear layer's weights. */

#ifndef KVFERRY_PRODUCTS_H
#define KVFERRY_PRODUCTS_H

#include <stdint.h>

/* Weights are converted to float32 as they are read, which loses nothing. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *weight; /* [rows, columns] */
    const float *bias;  /* [rows], or NULL */
    int64_t rows, columns, kind;
} product;

/* The rows of a part of a product, by its size alone, and the number of parts; the last may have fewer. */
int64_t part_rows(const product *its);
int64_t num_parts(const product *its);

/* How many of `threads` are worth a product of B tokens and so many weights. */
int64_t threads_for(int64_t num_weights, int64_t B, int64_t threads);

/* The columns `first` up to `end` of y [B, rows] = x [B, columns] weight^T + bias. */
void multiply_rows(const product *its, int64_t first, int64_t end, int64_t B, const float *x, float *y);

/* Several products of the same x, each into its own y. */
void multiply(const product *const *products, float *const *y, int number, int64_t B, const float *x, int64_t threads);

/* One of them. */
void kvferry_multiply(const product *its, int64_t B, int64_t threads, const float *x, float *y);

#endif
