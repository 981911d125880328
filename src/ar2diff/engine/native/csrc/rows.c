/* Work on single rows: norm, rotary positions, quantisation. */
#include "native.h"
#include "simd.h"

/* Bytes round(x * 127 / absmax) for each group; a value that is not finite makes the group's scale not a number. */
static void quantise_groups(const float *x, int64_t row, int64_t first, int64_t count, const Rows *rows)
{
    for (int64_t group = 0; group < count; group++) {
        const float *from = x + group * GROUP;
        int64_t place = row * rows->stride + first + group;
        int8_t *bytes = rows->bytes + place * GROUP;
        vf top = vset(0.0f), poison = vset(0.0f);
        for (int i = 0; i < GROUP; i += LANES) {
            vf part = vload(from + i);
            top = vmax(top, vabs(part));
            poison = poison + part * 0.0f;
        }
        float absmax = vtop(top), spoiled = vsum(poison);
        vf inverse = vset(absmax > 0.0f && spoiled == 0.0f ? 127.0f / absmax : 0.0f);
        vi sums = viset(0);
        for (int i = 0; i < GROUP; i += LANES) {
            vi rounded = vround(vload(from + i) * inverse);
            *(vb_any *)(bytes + i) = __builtin_convertvector(rounded, vb_any);
            sums += rounded;
        }
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) sum += sums[i];
        rows->scales[place] = spoiled == 0.0f ? absmax / 127.0f : spoiled;
        rows->shifts[place] = -128 * sum;
    }
}

void quantise_row(const float *x, int64_t row, const Rows *rows)
{
    quantise_groups(x, row, 0, rows->num_groups, rows);
}

/* Adds what an adapter's down matrices make of a quantised row as further groups; zeros for a row that is not gated. */
void extend_row(const Matrix *update, int is_gated, int64_t row, const Rows *rows, float *low)
{
    int64_t width = update->num_tiles * TILE;
    memset(low, 0, width * sizeof(float));
    if (is_gated) {
        int64_t start = row * rows->stride;
        Rows one = {rows->bytes + start * GROUP, rows->scales + start, rows->shifts + start, rows->num_groups, 0};
        Target to = {low, width, width, STORE, 0, 1.0f};
        for (int64_t tile = 0; tile < update->num_tiles; tile++) multiply_tile(update, tile, &one, 1, &to);
    }
    quantise_groups(low, row, update->num_groups, width / GROUP, rows);
}

/* x / rms(x) * weight; `weight` is padded with zeros, so padding stays zero. Safe in place. */
void normalise_row(const float *x, const float *weight, float *out, int64_t size, int64_t padded, double eps)
{
    vf squares = vset(0.0f);
    for (int64_t i = 0; i < padded; i += LANES) squares = vfma(vload(x + i), vload(x + i), squares);
    float mean = vsum(squares) / (float)size;
    vf factor = vset(1.0f / sqrtf(mean + (float)eps));
    for (int64_t i = 0; i < padded; i += LANES) vstore(out + i, vload(x + i) * factor * vload(weight + i));
}

/* Rotary positions, first half against second. */
void rotate_head(float *x, const float *cos, const float *sin, int64_t head_dim)
{
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}
