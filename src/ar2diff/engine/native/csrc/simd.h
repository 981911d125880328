/* Sixteen lanes of floats or integers, with one result on every machine.
 *
 * The lane types are the compiler's own vectors, so + - * / and comparisons need no code here. What they lack is
 * written twice: with AVX-512 instructions, and as loops for any other machine (or with AR2_PORTABLE). Both round the
 * same way, so every number is the same bit for bit. Products of bytes have an AVX2 form too, in gemm.c. Build with -ffp-contract=off and without -ffast-math.
 */
#ifndef AR2_SIMD_H
#define AR2_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vf __attribute__((vector_size(64), may_alias));
typedef int32_t vi __attribute__((vector_size(64), may_alias));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t vb_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), may_alias));

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__) \
    && !defined(AR2_PORTABLE)
#define AR2_AVX512 1
#include <immintrin.h>
#else
#define AR2_AVX512 0
#endif

#if defined(__AVX2__) && defined(__FMA__) && !AR2_AVX512 && !defined(AR2_PORTABLE)
#define AR2_AVX2 1
#include <immintrin.h>
#else
#define AR2_AVX2 0
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE vf vload(const float *at) { return *(const vf_any *)at; }
INLINE void vstore(float *at, vf x) { *(vf_any *)at = x; }
INLINE vf vset(float x) { return (vf){0} + x; }
INLINE vi viset(int32_t x) { return (vi){0} + x; }
INLINE vf vfloat(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf vpick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf vabs(vf x) { return (vf)((vi)x & viset(0x7fffffff)); }

/* Sixteen bfloat16 numbers as floats. */
INLINE vf vload_bf16(const uint16_t *at)
{
    return (vf)(__builtin_convertvector(*(const vh_any *)at, vu) << 16);
}

#if AR2_AVX512
INLINE vf vfma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/* The second argument where either is not a number, as the machine's instruction has it. */
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vi vround(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
/* Per lane: sum + four products of unsigned bytes of `weights` and the four signed bytes of `bytes`. */
INLINE vi vdot(vi sum, vi weights, int32_t bytes)
{
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(bytes));
}
#else
INLINE vf vfma(vf a, vf b, vf c)
{
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
}
INLINE vf vmax(vf a, vf b) { return vpick(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return vpick(a < b, a, b); }
/* Adding 1.5 * 2^23 leaves no room for a fraction; for numbers below 2^22. */
INLINE vi vround(vf x) { return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, vi); }
INLINE vi vdot(vi sum, vi weights, int32_t bytes)
{
    for (int i = 0; i < 4; i++) sum += (vi)((vu)weights >> (8 * i) & 255) * (int8_t)((uint32_t)bytes >> (8 * i));
    return sum;
}
#endif

/* Sums and maxima over lanes, always by halves. */
INLINE float vsum(vf x)
{
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
INLINE float vtop(vf x)
{
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}

/* e^x to about one unit in the last place; arguments are held to [-87, 88]. Not a number stays so. */
INLINE vf vexp(vf x)
{
    x = vmax(vset(-87.0f), vmin(vset(88.0f), x));
    vi n = vround(x * 1.44269504f);
    vf scale = vfloat(n);
    vf r = vfma(scale, vset(-0.693359375f), x);
    r = vfma(scale, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, r * r, r + 1.0f);
    return (vf)((vi)p + (n << 23));
}

#endif
