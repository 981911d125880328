/* Attention of new rows over the cache: fp32, one row and head at a time in a fixed order of keys.
 *
 * A row's sums run over keys in cache order, sixteen partial sums by key modulo 16; a key that is not seen adds zero.
 * So a row's result does not depend on what lies behind it or on how many rows share the pass.
 */
#include "native.h"
#include "simd.h"

#define BLOCK 4 /* queries whose sums fit into the registers */

int64_t attention_scratch_floats(const Model *model, int64_t num_keys)
{
    int64_t queries = ATTENTION_ROWS * (model->num_heads / model->num_kv_heads);
    int64_t padded = (num_keys + LANES - 1) / LANES * LANES;
    return queries * padded + model->head_dim * LANES + queries * LANES;
}

int64_t find_place(const Pass *pass, const Segment *segment, int64_t key)
{
    return segment->pages[key / pass->page_size] * pass->page_size + key % pass->page_size;
}

/* Which of the keys from the first tile with new keys on a row of a segment sees. */
void build_visible(const Segment *segment, int64_t row, int32_t *visible, int64_t visible_len, int64_t *row_end)
{
    int64_t before = segment->prefix_len % LANES, rows = segment->num_rows, last = 0;
    for (int64_t i = 0; i < visible_len; i++) {
        int64_t key = i - before;
        int seen = i < before || (key < rows && (!segment->mask || segment->mask[row * rows + key]));
        visible[i] = seen ? -1 : 0;
        if (seen) last = i + 1;
    }
    *row_end = segment->prefix_len - before + last;
}

#if AR2_AVX512
/* Sixteen keys of sixteen dimensions each, turned. */
INLINE void turn_16(const float *from, int64_t stride, float *to)
{
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + 2 + j]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    /* a[4q + c] holds, in quarter p, dimension 4p + c of keys 4q .. 4q + 3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 even = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        __m512 even2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        __m512 odd2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_ps(to + (0 + c) * 16, _mm512_shuffle_f32x4(even, even2, 0x88));
        _mm512_storeu_ps(to + (8 + c) * 16, _mm512_shuffle_f32x4(even, even2, 0xdd));
        _mm512_storeu_ps(to + (4 + c) * 16, _mm512_shuffle_f32x4(odd, odd2, 0x88));
        _mm512_storeu_ps(to + (12 + c) * 16, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
    }
}
#endif

/* Keys of one tile by dimension: turned[d][key]; keys that do not exist are zero. */
static void turn_keys(const float *keys, int64_t num_keys, int64_t head_dim, float *turned)
{
    int64_t done = 0;
#if AR2_AVX512
    if (num_keys >= LANES)
        for (; done + 16 <= head_dim; done += 16) turn_16(keys + done, head_dim, turned + done * LANES);
#endif
    for (int64_t d = done; d < head_dim; d++)
        for (int64_t key = 0; key < LANES; key++)
            turned[d * LANES + key] = key < num_keys ? keys[key * head_dim + d] : 0.0f;
}

INLINE void score_block(
    const int count, const float *const *queries, const float *turned, int64_t head_dim, float scale, vf *scores)
{
    vf even[BLOCK], odd[BLOCK];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) even[q] = odd[q] = vset(0.0f);
    for (int64_t d = 0; d < head_dim; d += 2) {
        vf first = vload(turned + d * LANES), second = vload(turned + (d + 1) * LANES);
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            even[q] = vfma(vset(queries[q][d]), first, even[q]);
            odd[q] = vfma(vset(queries[q][d + 1]), second, odd[q]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) scores[q] = (even[q] + odd[q]) * scale;
}

/* Scores to weights in place; returns their sum. `visible` covers the keys from `first_masked` on. */
static float soften(float *scores, int64_t num_keys, int64_t first_masked, const int32_t *visible)
{
    const vf never = vset(-INFINITY);
    vf top = never, sum = vset(0.0f);
    for (int64_t key = 0; key < num_keys; key += LANES) {
        vf part = vload(scores + key);
        if (key >= first_masked) {
            part = vpick(*(const vi_any *)(visible + key - first_masked), part, never);
            vstore(scores + key, part);
        }
        top = vmax(top, part);
    }
    vf level = vset(vtop(top));
    for (int64_t key = 0; key < num_keys; key += LANES) {
        vf part = vexp(vload(scores + key) - level);
        if (key >= first_masked)
            part = vpick(*(const vi_any *)(visible + key - first_masked), part, vset(0.0f));
        vstore(scores + key, part);
        sum = sum + part;
    }
    return vsum(sum);
}

/* Where the keys or values of one sequence, layer and head lie. */
typedef struct {
    const float *from;
    const Pass *pass;
    const Segment *segment;
} Places;

INLINE const float *find(const Places *places, int64_t key)
{
    return places->from + find_place(places->pass, places->segment, key) * places->pass->keys_dim;
}

/* Weighted sums of one slice of 16 * CHUNKS dimensions of the values, for COUNT queries. */
INLINE void mix_block(const int count, const int chunks, const float *const *weights, const float *values,
    int64_t num_keys, int64_t head_dim, const float *sums, float *const *out)
{
    vf total[BLOCK][4];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) total[q][c] = vset(0.0f);
    for (int64_t key = 0; key < num_keys; key++, values += head_dim) {
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) {
            vf part = vload(values + c * LANES);
#pragma GCC unroll 4
            for (int q = 0; q < count; q++) total[q][c] = vfma(vset(weights[q][key]), part, total[q][c]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) vstore(out[q] + c * LANES, total[q][c] / sums[q]);
}

static void mix_dimension(
    const float *weights, const float *values, int64_t num_keys, int64_t head_dim, float sum, float *out)
{
    float total = 0.0f;
    for (int64_t key = 0; key < num_keys; key++) total = __builtin_fmaf(weights[key], values[key * head_dim], total);
    *out = total / sum;
}

static void mix(int64_t count, const float *const *weights, const float *values, int64_t num_keys, int64_t head_dim,
    const float *sums, float *const *out)
{
    int64_t d = 0;
    float *at[BLOCK];
    for (; d + LANES <= head_dim;) {
        int wide = head_dim - d >= 4 * LANES;
        for (int64_t q = 0; q < count; q++) at[q] = out[q] + d;
        for (int64_t q = 0; q < count; q++) {
            if (count == BLOCK) {
                if (wide) mix_block(4, 4, weights, values + d, num_keys, head_dim, sums, at);
                else mix_block(4, 1, weights, values + d, num_keys, head_dim, sums, at);
                break;
            }
            if (count == 3 && wide) {
                mix_block(3, 4, weights, values + d, num_keys, head_dim, sums, at);
                break;
            }
            if (wide) mix_block(1, 4, weights + q, values + d, num_keys, head_dim, sums + q, at + q);
            else mix_block(1, 1, weights + q, values + d, num_keys, head_dim, sums + q, at + q);
        }
        d += wide ? 4 * LANES : LANES;
    }
    for (; d < head_dim; d++)
        for (int64_t q = 0; q < count; q++)
            mix_dimension(weights[q], values + d, num_keys, head_dim, sums[q], out[q] + d);
}

typedef struct {
    int64_t num_queries, num_keys, padded;
    const float *keys, *values;
    float *scores;
} Piece;

static void score_all(const Attention *work, const Piece *piece, int64_t kv_head, int64_t first_row, float *turned)
{
    const Model *model = work->model;
    int64_t dim = model->head_dim, groups = model->num_heads / model->num_kv_heads;
    for (int64_t key = 0; key < piece->num_keys; key += LANES) {
        turn_keys(piece->keys + key * dim, piece->num_keys - key, dim, turned);
        for (int64_t q = 0; q < piece->num_queries; q += BLOCK) {
            const float *queries[BLOCK];
            vf scores[BLOCK];
            int64_t count = piece->num_queries - q < BLOCK ? piece->num_queries - q : BLOCK;
            for (int64_t i = 0; i < BLOCK; i++) {
                int64_t one = q + (i < count ? i : 0), row = first_row + one / groups;
                queries[i] = work->qkv + row * work->qkv_stride + (kv_head * groups + one % groups) * dim;
            }
            if (count == 3) score_block(3, queries, turned, dim, model->softmax_scale, scores);
            else if (count == 1) score_block(1, queries, turned, dim, model->softmax_scale, scores);
            else score_block(4, queries, turned, dim, model->softmax_scale, scores);
            for (int64_t i = 0; i < count; i++) vstore(piece->scores + (q + i) * piece->padded + key, scores[i]);
        }
    }
}

void attend_piece(const Attention *work, int64_t layer, int64_t kv_head, int64_t first_row, float *scratch)
{
    const Model *model = work->model;
    const Pass *pass = work->pass;
    int64_t dim = model->head_dim, groups = model->num_heads / model->num_kv_heads;
    int64_t rows = pass->num_rows - first_row < ATTENTION_ROWS ? pass->num_rows - first_row : ATTENTION_ROWS;
    int64_t base = (layer * model->num_kv_heads + kv_head) * pass->capacity * dim;
    Piece piece = {rows * groups, 0, 0, pass->keys + base, pass->values + base, scratch + dim * LANES};
    for (int64_t row = first_row; row < first_row + rows; row++)
        if (work->row_ends[row] > piece.num_keys) piece.num_keys = work->row_ends[row];
    piece.padded = (piece.num_keys + LANES - 1) / LANES * LANES;
    score_all(work, &piece, kv_head, first_row, scratch);
    for (int64_t q = 0; q < piece.num_queries; q += BLOCK) {
        const float *weights[BLOCK];
        float *out[BLOCK], sums[BLOCK];
        int64_t count = piece.num_queries - q < BLOCK ? piece.num_queries - q : BLOCK;
        for (int64_t i = 0; i < count; i++) {
            int64_t row = first_row + (q + i) / groups;
            float *scores = piece.scores + (q + i) * piece.padded;
            const int32_t *visible = work->visible + row * work->visible_stride;
            sums[i] = soften(scores, piece.padded, work->first_masked, visible);
            weights[i] = scores;
            out[i] = work->out + row * work->out_stride + (kv_head * groups + (q + i) % groups) * dim;
        }
        mix(count, weights, piece.values, piece.num_keys, dim, sums, out);
    }
}
