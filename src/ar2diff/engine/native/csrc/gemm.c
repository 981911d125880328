/* Rows times packed int8 weights. Sums of bytes are exact; scales are applied group by group in one fixed order, so a
 * row's result is the same in blocks of any number of rows. */
#include "native.h"
#include "simd.h"

/* Rows whose sums fit into the registers, and inputs taken in a row. */
#if AR2_AVX512
#define MAX_BLOCK 6
#define UNROLL _Pragma("GCC unroll 8")
#elif AR2_AVX2
#define MAX_BLOCK 4
#else
#define MAX_BLOCK 1
#define UNROLL
#endif

/* One block of a tile's rows. */
typedef struct {
    int64_t block, blocks, first;
} Span;

INLINE vf gelu_tanh(vf x)
{
    vf inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
    return x * (1.0f - 1.0f / (vexp(2.0f * inner) + 1.0f));
}

/* The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE vf gelu(vf x)
{
    vf z = vabs(x) * 0.70710678f;
    vf t = 1.0f / (1.0f + 0.3275911f * z);
    vf p = vfma(vset(1.061405429f), t, vset(-1.453152027f));
    p = vfma(p, t, vset(1.421413741f));
    p = vfma(p, t, vset(-0.284496736f));
    p = vfma(p, t, vset(0.254829592f)) * t;
    vf tail = 0.5f * p * vexp(-(z * z));
    return x * vpick(x < 0.0f, tail, 1.0f - tail);
}

INLINE vf activate(vf x, int kind)
{
    if (kind == SILU) return x / (1.0f + vexp(-x));
    return kind == GELU ? gelu(x) : gelu_tanh(x);
}

INLINE void put(float *out, vf value, int64_t columns)
{
    if (columns >= LANES) {
        vstore(out, value);
    } else {
        for (int64_t i = 0; i < columns; i++) out[i] = value[i];
    }
}

INLINE void finish(const Matrix *matrix, int64_t tile, vf low, vf high, const Target *to, int64_t row)
{
    if (matrix->bias) {
        low += vload(matrix->bias + tile * TILE);
        high += vload(matrix->bias + tile * TILE + LANES);
    }
    if (to->kind == GATED) {
        vstore(to->out + row * to->stride + tile * LANES, activate(low, to->activation) * high);
        return;
    }
    float *out = to->out + row * to->stride + tile * TILE;
    int64_t columns = to->num_columns - tile * TILE;
    if (to->kind == ADD) {
        vstore(out, vfma(low, vset(to->scale), vload(out)));
        vstore(out + LANES, vfma(high, vset(to->scale), vload(out + LANES)));
    } else {
        put(out, low * to->scale, columns);
        put(out + LANES, high * to->scale, columns - LANES);
    }
}

/* Fetch the next tile's group while this one is multiplied: memory is what a pass of few rows waits for. */
INLINE void fetch_group(const uint8_t *group)
{
    for (int line = 0; line < TILE_BYTES; line += 64) __builtin_prefetch(group + line, 0, 2);
}

#if AR2_AVX2
/* Per lane: sum + four products of the signed bytes of `weights` and of `bytes`. */
INLINE __m256i dot_8(__m256i sum, __m256i weights, __m256i sizes, __m256i bytes)
{
#ifdef __AVXVNNI__
    (void)sizes;
    return _mm256_dpbusd_avx_epi32(sum, weights, bytes);
#else
    /* |w| * (a with the sign of w): two products are at most 2 * 127 * 127, which fits into sixteen bits. */
    __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(bytes, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* One group of sixteen outputs: adds to total[row][part]. */
INLINE void multiply_half(const int count, const uint8_t *from, const uint16_t *weight_scales, const int8_t *bytes,
    const float *scales, const int32_t *shifts, int64_t stride, __m256 (*total)[2])
{
    __m256i sum[MAX_BLOCK][2];
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) {
#ifdef __AVXVNNI__
        sum[r][0] = sum[r][1] = _mm256_set1_epi32(shifts[r * stride]);
#else
        (void)shifts;
        sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#endif
    }
#pragma GCC unroll 8
    for (int k = 0; k < GROUP / 4; k++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + k * 4 * TILE));
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + k * 4 * TILE + 32));
#ifdef __AVXVNNI__
        __m256i low_size = low, high_size = high;
#else
        const __m256i shift = _mm256_set1_epi8(-128);
        low = _mm256_xor_si256(low, shift), high = _mm256_xor_si256(high, shift);
        __m256i low_size = _mm256_abs_epi8(low), high_size = _mm256_abs_epi8(high);
#endif
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            int32_t four;
            memcpy(&four, bytes + r * stride * GROUP + 4 * k, 4);
            __m256i spread = _mm256_set1_epi32(four);
            sum[r][0] = dot_8(sum[r][0], low, low_size, spread);
            sum[r][1] = dot_8(sum[r][1], high, high_size, spread);
        }
    }
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        __m128i halves = _mm_loadu_si128((const __m128i *)(weight_scales + 8 * part));
        __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#pragma GCC unroll 4
        for (int r = 0; r < count; r++)
            total[r][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][part]),
                _mm256_mul_ps(scale, _mm256_set1_ps(scales[r * stride])), total[r][part]);
    }
}

INLINE void multiply_block(
    const int count, const Matrix *matrix, int64_t tile, const Rows *rows, const Span *span, const Target *to)
{
    const int64_t groups = matrix->num_groups, stride = rows->stride, start = span->first * stride;
    const int64_t tile_bytes = (groups + matrix->num_extra) * TILE_BYTES;
    const uint8_t *from = matrix->tiles + tile * tile_bytes, *next = from + tile_bytes;
    __m256 total[2][MAX_BLOCK][2];
    memset(total, 0, sizeof total);
    int64_t fetched = span->block * groups;
    for (int64_t group = 0; group < groups; group++, fetched++, from += TILE_BYTES) {
        if (fetched % span->blocks == 0) fetch_group(next + fetched / span->blocks * TILE_BYTES);
        const int8_t *bytes = rows->bytes + (start + group) * GROUP;
        const uint16_t *weight_scales = (const uint16_t *)(from + TILE * GROUP);
        for (int half = 0; half < 2; half++)
            multiply_half(count, from + 64 * half, weight_scales + LANES * half, bytes, rows->scales + start + group,
                rows->shifts + start + group, stride, total[half]);
    }
    for (int r = 0; r < count; r++) {
        vf low, high;
        memcpy(&low, total[0][r], sizeof low);
        memcpy(&high, total[1][r], sizeof high);
        finish(matrix, tile, low, high, to, span->first + r);
    }
}
#else
/* COUNT is a constant at each call, so that the sums stay in registers. */
INLINE void multiply_block(
    const int count, const Matrix *matrix, int64_t tile, const Rows *rows, const Span *span, const Target *to)
{
    const int64_t first = span->first;
    const int64_t groups = matrix->num_groups;
    const int64_t tile_bytes = (groups + matrix->num_extra) * TILE_BYTES, stride = rows->stride;
    const uint8_t *from = matrix->tiles + tile * tile_bytes;
    const int8_t *bytes = rows->bytes + first * stride * GROUP;
    const float *scales = rows->scales + first * stride;
    const int32_t *shifts = rows->shifts + first * stride;
    const uint8_t *next = from + tile_bytes;
    vf total[MAX_BLOCK][2];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) total[r][0] = total[r][1] = vset(0.0f);
    int64_t fetched = span->block * groups;
    for (int64_t group = 0; group < groups; group++, fetched++) {
        if (fetched % span->blocks == 0) fetch_group(next + fetched / span->blocks * TILE_BYTES);
        vi sum[MAX_BLOCK][2];
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = viset(shifts[r * stride + group]);
        UNROLL for (int k = 0; k < GROUP / 4; k++) {
            vi low = *(const vi_any *)(from + k * 4 * TILE), high = *(const vi_any *)(from + k * 4 * TILE + 64);
#pragma GCC unroll 6
            for (int r = 0; r < count; r++) {
                int32_t four;
                memcpy(&four, bytes + (r * stride + group) * GROUP + 4 * k, 4);
                sum[r][0] = vdot(sum[r][0], low, four);
                sum[r][1] = vdot(sum[r][1], high, four);
            }
        }
        const uint16_t *weight_scales = (const uint16_t *)(from + TILE * GROUP);
        vf low_scale = vload_bf16(weight_scales), high_scale = vload_bf16(weight_scales + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            float scale = scales[r * stride + group];
            total[r][0] = vfma(vfloat(sum[r][0]), low_scale * scale, total[r][0]);
            total[r][1] = vfma(vfloat(sum[r][1]), high_scale * scale, total[r][1]);
        }
        from += TILE_BYTES;
    }
    for (int r = 0; r < count; r++) finish(matrix, tile, total[r][0], total[r][1], to, first + r);
}

#endif

void multiply_tile(const Matrix *matrix, int64_t tile, const Rows *rows, int64_t num_rows, const Target *target)
{
    Span span = {0, (num_rows + MAX_BLOCK - 1) / MAX_BLOCK, 0};
    for (; span.block < span.blocks; span.block++) {
        int64_t left = span.blocks - span.block, count = (num_rows - span.first + left - 1) / left;
        switch (count) {
        case 1: multiply_block(1, matrix, tile, rows, &span, target); break;
#if MAX_BLOCK > 1
        case 2: multiply_block(2, matrix, tile, rows, &span, target); break;
        case 3: multiply_block(3, matrix, tile, rows, &span, target); break;
        case 4: multiply_block(4, matrix, tile, rows, &span, target); break;
#endif
#if MAX_BLOCK > 4
        case 5: multiply_block(5, matrix, tile, rows, &span, target); break;
        default: multiply_block(6, matrix, tile, rows, &span, target);
#endif
        }
        span.first += count;
    }
}
