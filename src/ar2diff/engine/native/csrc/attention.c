/* Attention of new rows over the cache: fp32, one row and head at a time in a fixed order of keys.
 *
 * A row's sums run over keys in cache order, sixteen partial sums by key modulo 16; a key that is not seen adds zero.
 * So a row's result does not depend on what lies behind it or on how many rows share the pass.
 */
#include "native.h"
#include "simd.h"

#define BLOCK 4 /* queries whose sums fit into the registers */
#define CHUNKS (AR2_AVX2 ? 2 : 4) /* registers of values taken together */

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

#if AR2_AVX2
/* Eight keys of eight dimensions each, turned into columns of a tile of sixteen keys. */
INLINE void turn_8(const float *from, int64_t stride, float *to)
{
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
        }
    /* a[4q + c] holds, in half p, dimension 4p + c of keys 4q .. 4q + 3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(to + c * LANES, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
        _mm256_storeu_ps(to + (4 + c) * LANES, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
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
#elif AR2_AVX2
    if (num_keys >= LANES)
        for (; done + 8 <= head_dim; done += 8) {
            turn_8(keys + done, head_dim, turned + done * LANES);
            turn_8(keys + 8 * head_dim + done, head_dim, turned + done * LANES + 8);
        }
#endif
    for (int64_t d = done; d < head_dim; d++)
        for (int64_t key = 0; key < LANES; key++)
            turned[d * LANES + key] = key < num_keys ? keys[key * head_dim + d] : 0.0f;
}

/* Scores of sixteen keys for COUNT queries; a query's scores lie `padded` floats apart. */
INLINE void score_block(const int count, const float *const *queries, const float *turned, int64_t head_dim,
    float scale, float *scores, int64_t padded)
{
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        vr even[BLOCK], odd[BLOCK];
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) even[q] = odd[q] = rset(0.0f);
        for (int64_t d = 0; d < head_dim; d += 2) {
            vr first = rload(turned + d * LANES + lane), second = rload(turned + (d + 1) * LANES + lane);
#pragma GCC unroll 4
            for (int q = 0; q < count; q++) {
                even[q] = rfma(rset(queries[q][d]), first, even[q]);
                odd[q] = rfma(rset(queries[q][d + 1]), second, odd[q]);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) rstore(scores + q * padded + lane, (even[q] + odd[q]) * scale);
    }
}

/* Scores to weights in place; returns their sum. `visible` covers the keys from `first_masked` on. */
static float soften(float *scores, int64_t num_keys, int64_t first_masked, const int32_t *visible)
{
    float tops[LANES], sums[LANES] = {0};
    for (int lane = 0; lane < LANES; lane++) tops[lane] = -INFINITY;
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        vr top = rload(tops + lane);
        for (int64_t key = lane; key < num_keys; key += LANES) {
            vr part = rload(scores + key);
            if (key >= first_masked) {
                part = rpick(*(const ri *)(visible + key - first_masked), part, rset(-INFINITY));
                rstore(scores + key, part);
            }
            top = rmax(top, part);
        }
        rstore(tops + lane, top);
    }
    vr level = rset(vtop(vload(tops)));
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        vr sum = rset(0.0f);
        for (int64_t key = lane; key < num_keys; key += LANES) {
            vr part = rexp(rload(scores + key) - level);
            if (key >= first_masked) part = rpick(*(const ri *)(visible + key - first_masked), part, rset(0.0f));
            rstore(scores + key, part);
            sum = sum + part;
        }
        rstore(sums + lane, sum);
    }
    return vsum(vload(sums));
}

/* Where the keys or values of one sequence, layer and head lie. */
typedef struct {
    const float *from;
    const Pass *pass;
    const Segment *segment;
    int64_t head_dim;
} Places;

INLINE const float *find(const Places *places, int64_t key)
{
    return places->from + find_place(places->pass, places->segment, key) * places->head_dim;
}

/* The end of the keys that lie side by side with this one. */
INLINE int64_t end_of_page(const Places *places, int64_t key, int64_t num_keys)
{
    int64_t size = places->pass->page_size, end = key - key % size + size;
    return end < num_keys ? end : num_keys;
}

/* Weighted sums of one slice of WIDTH * CHUNKS dimensions of the values, for COUNT queries. */
INLINE void mix_block(const int count, const int chunks, const float *const *weights, const Places *values,
    int64_t first, int64_t num_keys, const float *sums, float *const *out)
{
    vr total[BLOCK][CHUNKS];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) total[q][c] = rset(0.0f);
    for (int64_t key = 0; key < num_keys;) {
        const float *at = find(values, key) + first;
        for (int64_t end = end_of_page(values, key, num_keys); key < end; key++, at += values->head_dim) {
#pragma GCC unroll 4
            for (int c = 0; c < chunks; c++) {
                vr part = rload(at + c * WIDTH);
#pragma GCC unroll 4
                for (int q = 0; q < count; q++) total[q][c] = rfma(rset(weights[q][key]), part, total[q][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) rstore(out[q] + c * WIDTH, total[q][c] / sums[q]);
}

static void mix_dimension(
    const float *weights, const Places *values, int64_t dimension, int64_t num_keys, float sum, float *out)
{
    float total = 0.0f;
    for (int64_t key = 0; key < num_keys; key++)
        total = __builtin_fmaf(weights[key], find(values, key)[dimension], total);
    *out = total / sum;
}

static void mix(int64_t count, const float *const *weights, const Places *values, int64_t num_keys,
    const float *sums, float *const *out)
{
    int64_t d = 0, head_dim = values->head_dim;
    float *at[BLOCK];
    for (; d + WIDTH <= head_dim;) {
        int wide = head_dim - d >= CHUNKS * WIDTH;
        for (int64_t q = 0; q < count; q++) at[q] = out[q] + d;
        for (int64_t q = 0; q < count; q++) {
            if (count == BLOCK) {
                if (wide) mix_block(4, CHUNKS, weights, values, d, num_keys, sums, at);
                else mix_block(4, 1, weights, values, d, num_keys, sums, at);
                break;
            }
            if (count == 3 && wide) {
                mix_block(3, CHUNKS, weights, values, d, num_keys, sums, at);
                break;
            }
            if (wide) mix_block(1, CHUNKS, weights + q, values, d, num_keys, sums + q, at + q);
            else mix_block(1, 1, weights + q, values, d, num_keys, sums + q, at + q);
        }
        d += wide ? CHUNKS * WIDTH : WIDTH;
    }
    for (; d < head_dim; d++)
        for (int64_t q = 0; q < count; q++)
            mix_dimension(weights[q], values, d, num_keys, sums[q], out[q] + d);
}

typedef struct {
    int64_t num_queries, num_keys, padded;
    Places keys, values;
    float *scores;
} Piece;

static void score_all(const Attention *work, const Piece *piece, int64_t kv_head, int64_t first_row, float *turned)
{
    const Model *model = work->model;
    int64_t dim = model->head_dim, groups = model->num_heads / model->num_kv_heads;
    for (int64_t key = 0; key < piece->num_keys; key += LANES) {
        turn_keys(find(&piece->keys, key), piece->num_keys - key, dim, turned);
        for (int64_t q = 0; q < piece->num_queries; q += BLOCK) {
            const float *queries[BLOCK];
            int64_t count = piece->num_queries - q < BLOCK ? piece->num_queries - q : BLOCK;
            for (int64_t i = 0; i < BLOCK; i++) {
                int64_t one = q + (i < count ? i : 0), row = first_row + one / groups;
                queries[i] = work->qkv + row * work->qkv_stride + (kv_head * groups + one % groups) * dim;
            }
            float *scores = piece->scores + q * piece->padded + key, scale = model->softmax_scale;
            if (count == 4) score_block(4, queries, turned, dim, scale, scores, piece->padded);
            else if (count == 3) score_block(3, queries, turned, dim, scale, scores, piece->padded);
            else if (count == 2) score_block(2, queries, turned, dim, scale, scores, piece->padded);
            else score_block(1, queries, turned, dim, scale, scores, piece->padded);
        }
    }
}

void attend_piece(
    const Attention *work, const Segment *segment, int64_t layer, int64_t kv_head, int64_t first_row, float *scratch)
{
    const Model *model = work->model;
    const Pass *pass = work->pass;
    int64_t dim = model->head_dim, groups = model->num_heads / model->num_kv_heads;
    int64_t rows = segment->first_row + segment->num_rows - first_row;
    if (rows > ATTENTION_ROWS) rows = ATTENTION_ROWS;
    int64_t base = (layer * model->num_kv_heads + kv_head) * pass->capacity * dim;
    Piece piece = {rows * groups, 0, 0, {pass->keys + base, pass, segment, dim},
        {pass->values + base, pass, segment, dim}, scratch + dim * LANES};
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
            sums[i] = soften(scores, piece.padded, segment->prefix_len - segment->prefix_len % LANES, visible);
            weights[i] = scores;
            out[i] = work->out + row * work->out_stride + (kv_head * groups + (q + i) % groups) * dim;
        }
        mix(count, weights, &piece.values, piece.num_keys, sums, out);
    }
}
