/* Rows times packed int8 weights. Sums of bytes are exact; scales are applied group by group in one fixed order, so a
 * row's result is the same in blocks of any number of rows. */
#include "native.h"
#include "simd.h"

/* Rows whose sums fit into the registers, and inputs taken in a row. */
#if AR2_AVX512
#define MAX_BLOCK 6
#define UNROLL _Pragma("GCC unroll 8")
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

/* COUNT is a constant at each call, so that the sums stay in registers. */
INLINE void multiply_block(
    const int count, const Matrix *matrix, int64_t tile, const Rows *rows, const Span *span, const Target *to)
{
    const int64_t first = span->first;
    const int64_t groups = matrix->num_groups;
    const uint8_t *from = matrix->tiles + tile * groups * TILE_BYTES;
    const int8_t *bytes = rows->bytes + first * groups * GROUP;
    const float *scales = rows->scales + first * groups;
    const int32_t *shifts = rows->shifts + first * groups;
    const uint8_t *next = from + groups * TILE_BYTES;
    vf total[MAX_BLOCK][2];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) total[r][0] = total[r][1] = vset(0.0f);
    int64_t fetched = span->block * groups;
    for (int64_t group = 0; group < groups; group++, fetched++) {
        if (fetched % span->blocks == 0) fetch_group(next + fetched / span->blocks * TILE_BYTES);
        vi sum[MAX_BLOCK][2];
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = viset(shifts[r * groups + group]);
        UNROLL for (int k = 0; k < GROUP / 4; k++) {
            vi low = *(const vi_any *)(from + k * 4 * TILE), high = *(const vi_any *)(from + k * 4 * TILE + 64);
#pragma GCC unroll 6
            for (int r = 0; r < count; r++) {
                int32_t four;
                memcpy(&four, bytes + (r * groups + group) * GROUP + 4 * k, 4);
                sum[r][0] = vdot(sum[r][0], low, four);
                sum[r][1] = vdot(sum[r][1], high, four);
            }
        }
        const uint16_t *weight_scales = (const uint16_t *)(from + TILE * GROUP);
        vf low_scale = vload_bf16(weight_scales), high_scale = vload_bf16(weight_scales + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            float scale = scales[r * groups + group];
            total[r][0] = vfma(vfloat(sum[r][0]), low_scale * scale, total[r][0]);
            total[r][1] = vfma(vfloat(sum[r][1]), high_scale * scale, total[r][1]);
        }
        from += TILE_BYTES;
    }
    for (int r = 0; r < count; r++) finish(matrix, tile, total[r][0], total[r][1], to, first + r);
}

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
        case 5: multiply_block(5, matrix, tile, rows, &span, target); break;
        default: multiply_block(6, matrix, tile, rows, &span, target);
#endif
        }
        span.first += count;
    }
}
