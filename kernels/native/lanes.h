/* Vectors of LANES float32 numbers, and of WIDTH where sums stay in registers, which the compiler makes
 * instructions of for its machine. */

#ifndef KVFERRY_LANES_H
#define KVFERRY_LANES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined __F16C__ || defined __FMA__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH LANES
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float half_lanes __attribute__((vector_size(2 * LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t short_lanes __attribute__((vector_size(2 * LANES)));
typedef uint8_t byte_lanes __attribute__((vector_size(LANES)));
typedef float wide __attribute__((vector_size(4 * WIDTH)));
typedef int32_t int_wide __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t short_wide __attribute__((vector_size(2 * WIDTH)));

INLINE lanes load(const float *from) {
    lanes its;
    memcpy(&its, from, sizeof its);
    return its;
}

INLINE wide load_wide(const float *from) {
    wide its;
    memcpy(&its, from, sizeof its);
    return its;
}

/* LANES float16 numbers as float32; for machines with instructions for it (kvferry_kinds). */
INLINE lanes load_halves(const uint16_t *from) {
#ifdef __F16C__
    short_lanes its;
    memcpy(&its, from, sizeof its);
    return (lanes)_mm256_cvtph_ps((__m128i)its);
#else
    (void)from;
    return (lanes){0};
#endif
}

INLINE void store(float *to, lanes its) { memcpy(to, &its, sizeof its); }

/* a * b + c, rounded once wherever the machine can: some compilers' tuning for some processors fuses the two in one
 * loop and not in another, and a number must not depend on the loop that makes it. */
INLINE wide multiplied_added(wide a, wide b, wide c) {
#ifdef __AVX512F__
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float sum(lanes its) {
    half_lanes low, high;
    memcpy(&low, &its, sizeof low);
    memcpy(&high, (const char *)&its + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

/* e^x for x <= 88, to about 1 unit in the last place (Cephes' polynomial); 0 below -87, NaN for NaN. */
INLINE lanes exponential(lanes x) {
    const lanes zero = {0};
    int_lanes tiny = x < zero - 87.0f;
    lanes bounded = (lanes)((int_lanes)x & ~tiny); /* those lanes are 0 */
    lanes shifted = bounded * 1.44269504088896341f + 12582912.0f;
    lanes n = shifted - 12582912.0f; /* rounded to an integer */
    lanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int_lanes power = ((int_lanes)shifted - 0x4B400000 + 127) << 23;
    return (lanes)((int_lanes)(p * (lanes)power) & ~tiny);
}

#endif
