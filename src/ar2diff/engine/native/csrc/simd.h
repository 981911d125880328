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

/* The lanes of one register, for kernels whose lanes do not meet. */
#if AR2_AVX2
#define WIDTH 8
typedef float vr __attribute__((vector_size(32), may_alias));
typedef int32_t ri __attribute__((vector_size(32), may_alias));
typedef float vr_any __attribute__((vector_size(32), aligned(4), may_alias));
INLINE vr rfma(vr a, vr b, vr c) { return (vr)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vr rmax(vr a, vr b) { return (vr)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vr rmin(vr a, vr b) { return (vr)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE ri rround(vr x) { return (ri)_mm256_cvtps_epi32((__m256)x); }
#else
#define WIDTH LANES
typedef vf vr;
typedef vi ri;
typedef vf_any vr_any;
INLINE vr rfma(vr a, vr b, vr c) { return vfma(a, b, c); }
INLINE vr rmax(vr a, vr b) { return vmax(a, b); }
INLINE vr rmin(vr a, vr b) { return vmin(a, b); }
INLINE ri rround(vr x) { return vround(x); }
#endif
INLINE vr rload(const float *at) { return *(const vr_any *)at; }
INLINE void rstore(float *at, vr x) { *(vr_any *)at = x; }
INLINE vr rset(float x) { return (vr){0} + x; }
INLINE vr rpick(ri mask, vr yes, vr no) { return (vr)(((ri)yes & mask) | ((ri)no & ~mask)); }

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
INLINE vr rexp(vr x)
{
    x = rmax(rset(-87.0f), rmin(rset(88.0f), x));
    ri n = rround(x * 1.44269504f);
    vr scale = __builtin_convertvector(n, vr);
    vr r = rfma(scale, rset(-0.693359375f), x);
    r = rfma(scale, rset(2.12194440e-4f), r);
    vr p = rset(1.9875691500e-4f);
    p = rfma(p, r, rset(1.3981999507e-3f));
    p = rfma(p, r, rset(8.3334519073e-3f));
    p = rfma(p, r, rset(4.1665795894e-2f));
    p = rfma(p, r, rset(1.6666665459e-1f));
    p = rfma(p, r, rset(5.0000001201e-1f));
    p = rfma(p, r * r, r + 1.0f);
    return (vr)((ri)p + (n << 23));
}

INLINE vf vexp(vf x)
{
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < LANES; i += WIDTH) rstore(lanes + i, rexp(rload(lanes + i)));
    memcpy(&x, lanes, sizeof lanes);
    return x;
}

#endif
