/* A forward pass: every thread runs all phases and takes pieces of each; a barrier ends a phase. */
#include <stdlib.h>

#include "native.h"
#include "pool.h"
#include "simd.h"

#define PIECES 16 /* of a product, at most */
#define PHASES_OF_LAYER 10

typedef struct Context Context;

/* What a round works on. It lies in the context, since a thread may look at it after the round. */
typedef struct Job {
    Pass pass;
    Attention attention;
    const float *hidden; /* logits: rows in */
    Target logits;
} Job;

struct Context {
    const Model *model;
    Pool *pool;
    int64_t max_rows, max_keys, max_extra; /* groups that an adapter adds to a row */
    float *qkv, *attended, *expanded, *normed, *low, **attention_scratch;
    int32_t *visible;
    int64_t *row_ends, *row_segments, *piece_rows, num_pieces; /* a piece: a row and those after it, of one segment */
    Rows hidden_rows, attended_rows, expanded_rows;
    Job job;
};

static int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }
static int64_t padded_hidden(const Model *m) { return round_up(m->hidden_size, TILE); }
static int64_t padded_heads(const Model *m) { return round_up(m->num_heads * m->head_dim, TILE); }
static int64_t padded_mlp(const Model *m) { return round_up(m->intermediate_size, TILE); }
static int64_t padded_qkv(const Model *m)
{
    return round_up((m->num_heads + 2 * m->num_kv_heads) * m->head_dim, TILE);
}

static void *allocate(int64_t bytes)
{
    void *memory = NULL;
    bytes = round_up(bytes > 0 ? bytes : 64, 64);
    if (posix_memalign(&memory, 64, bytes)) return NULL;
    memset(memory, 0, bytes);
    return memory;
}

static int open_rows(Rows *rows, int64_t num_rows, int64_t width, int64_t num_extra)
{
    rows->num_groups = width / GROUP;
    rows->stride = rows->num_groups + num_extra;
    rows->bytes = allocate(num_rows * rows->stride * GROUP);
    rows->scales = allocate(num_rows * rows->stride * sizeof(float));
    rows->shifts = allocate(num_rows * rows->stride * sizeof(int32_t));
    return rows->bytes && rows->scales && rows->shifts;
}

static void close_rows(Rows *rows)
{
    free(rows->bytes);
    free(rows->scales);
    free(rows->shifts);
    memset(rows, 0, sizeof *rows);
}

static void release(Context *c)
{
    free(c->qkv);
    free(c->attended);
    free(c->expanded);
    free(c->normed);
    free(c->low);
    free(c->visible);
    free(c->row_ends);
    free(c->row_segments);
    free(c->piece_rows);
    for (int t = 0; t < pool_size(c->pool); t++) {
        free(c->attention_scratch[t]);
        c->attention_scratch[t] = NULL;
    }
    close_rows(&c->hidden_rows);
    close_rows(&c->attended_rows);
    close_rows(&c->expanded_rows);
    c->qkv = c->attended = c->expanded = c->normed = c->low = NULL;
    c->visible = NULL;
    c->row_ends = c->row_segments = c->piece_rows = NULL;
    c->max_rows = c->max_keys = 0;
}

/* Room for a pass; 0 where memory is short. */
static int reserve(Context *c, int64_t rows, int64_t keys)
{
    const Model *m = c->model;
    if (rows <= c->max_rows && keys <= c->max_keys) return 1;
    rows = rows > c->max_rows ? round_up(rows, 8) : c->max_rows;
    keys = keys > c->max_keys ? round_up(keys, 256) : c->max_keys;
    release(c);
    int good = open_rows(&c->hidden_rows, rows, padded_hidden(m), c->max_extra);
    good &= open_rows(&c->attended_rows, rows, padded_heads(m), c->max_extra);
    good &= open_rows(&c->expanded_rows, rows, padded_mlp(m), c->max_extra);
    good &= (c->qkv = allocate(rows * padded_qkv(m) * 4)) != NULL;
    good &= (c->attended = allocate(rows * padded_heads(m) * 4)) != NULL;
    good &= (c->expanded = allocate(rows * padded_mlp(m) * 4)) != NULL;
    good &= (c->normed = allocate(pool_size(c->pool) * padded_hidden(m) * 4)) != NULL;
    good &= (c->low = allocate(pool_size(c->pool) * c->max_extra * GROUP * 4)) != NULL;
    good &= (c->visible = allocate(rows * (rows + 2 * LANES) * 4)) != NULL;
    good &= (c->row_ends = allocate(rows * 8)) != NULL;
    good &= (c->row_segments = allocate(rows * 8)) != NULL;
    good &= (c->piece_rows = allocate(rows * 8)) != NULL;
    for (int t = 0; t < pool_size(c->pool); t++)
        good &= (c->attention_scratch[t] = allocate(attention_scratch_floats(m, keys) * 4)) != NULL;
    if (good) c->max_rows = rows, c->max_keys = keys;
    else release(c);
    return good;
}

static void extend(Context *c, const Matrix *update, int64_t row, const Rows *rows, const Turn *turn)
{
    const uint8_t *gate = c->job.pass.gate;
    if (gate) extend_row(update, gate[row], row, rows, c->low + turn->thread * c->max_extra * GROUP);
}

static void norm_rows(Context *c, const float *weight, const Matrix *update, int64_t phase, Turn *turn)
{
    int64_t width = padded_hidden(c->model), rows = c->job.pass.num_rows, row;
    while ((row = pool_take(turn, phase, rows)) >= 0) {
        float *normed = c->normed + turn->thread * width;
        normalise_row(c->job.pass.x + row * width, weight, normed, c->model->hidden_size, width, c->model->norm_eps);
        quantise_row(normed, row, &c->hidden_rows);
        extend(c, update, row, &c->hidden_rows, turn);
    }
    pool_finish(turn, phase, rows);
}

enum { ATTENDED, EXPANDED, HIDDEN };

static void quantise_rows(Context *c, int source, const Matrix *update, int64_t phase, Turn *turn)
{
    const Model *m = c->model;
    const float *from = source == ATTENDED ? c->attended : source == EXPANDED ? c->expanded : c->job.hidden;
    const Rows *to = source == ATTENDED ? &c->attended_rows : source == EXPANDED ? &c->expanded_rows : &c->hidden_rows;
    int64_t width = source == ATTENDED ? padded_heads(m) : source == EXPANDED ? padded_mlp(m) : padded_hidden(m);
    int64_t rows = c->job.pass.num_rows, row;
    while ((row = pool_take(turn, phase, rows)) >= 0) {
        quantise_row(from + row * width, row, to);
        extend(c, update, row, to, turn);
    }
    pool_finish(turn, phase, rows);
}

enum { TO_QKV, TO_X, TO_EXPANDED, TO_LOGITS };

static Target choose_target(const Context *c, int kind)
{
    const Model *m = c->model;
    switch (kind) {
    case TO_QKV: return (Target){c->qkv, padded_qkv(m), padded_qkv(m), STORE, 0, 1.0f};
    case TO_X: return (Target){c->job.pass.x, padded_hidden(m), padded_hidden(m), ADD, 0, m->residual_scale};
    case TO_EXPANDED:
        return (Target){c->expanded, padded_mlp(m), padded_mlp(m), GATED, (int)m->activation, 1.0f};
    default: return c->job.logits;
    }
}

static void multiply(
    Context *c, const Matrix *matrix, const Rows *rows, int target_kind, int64_t phase, Turn *turn)
{
    int64_t step = round_up(matrix->num_tiles, PIECES) / PIECES, piece;
    int64_t pieces = (matrix->num_tiles + step - 1) / step;
    while ((piece = pool_take(turn, phase, pieces)) >= 0) {
        Target target = choose_target(c, target_kind);
        Matrix used = *matrix;
        if (c->job.pass.gate) used.num_groups += used.num_extra, used.num_extra = 0;
        int64_t end = (piece + 1) * step < matrix->num_tiles ? (piece + 1) * step : matrix->num_tiles;
        for (int64_t tile = piece * step; tile < end; tile++)
            multiply_tile(&used, tile, rows, c->job.pass.num_rows, &target);
    }
    pool_finish(turn, phase, pieces);
}

/* The norm of one head, whose size need not fill whole vectors. */
static void normalise_head(float *head, const float *weight, int64_t dim, double eps)
{
    float padded[MAX_HEAD_DIM];
    int64_t width = round_up(dim, LANES);
    memset(padded, 0, width * sizeof(float));
    memcpy(padded, head, dim * sizeof(float));
    normalise_row(padded, weight, padded, dim, width, eps);
    memcpy(head, padded, dim * sizeof(float));
}

static const Segment *find_segment(const Context *c, int64_t row)
{
    return c->job.pass.segments + c->row_segments[row];
}

/* Head norms and positions of new queries and keys; keys and values go into the cache. */
static void stage_rows(Context *c, int64_t layer_idx, int64_t phase, Turn *turn)
{
    const Model *m = c->model;
    const Layer *layer = m->layers + layer_idx;
    int64_t dim = m->head_dim, half = dim / 2, rows = c->job.pass.num_rows, row;
    while ((row = pool_take(turn, phase, rows)) >= 0) {
        const Pass *pass = &c->job.pass;
        float *heads = c->qkv + row * padded_qkv(m);
        for (int64_t head = 0; head < m->num_heads + m->num_kv_heads; head++) {
            const float *weight = head < m->num_heads ? layer->q_norm : layer->k_norm;
            if (weight) normalise_head(heads + head * dim, weight, dim, m->norm_eps);
            if (layer->rotary) rotate_head(heads + head * dim, pass->cos + row * half, pass->sin + row * half, dim);
        }
        const Segment *segment = find_segment(c, row);
        int64_t key_place = find_place(pass, segment, segment->prefix_len + row - segment->first_row);
        for (int64_t head = 0; head < m->num_kv_heads; head++) {
            int64_t place = (layer_idx * m->num_kv_heads + head) * pass->capacity + key_place;
            memcpy(pass->keys + place * dim, heads + (m->num_heads + head) * dim, dim * 4);
            memcpy(pass->values + place * dim, heads + (m->num_heads + m->num_kv_heads + head) * dim, dim * 4);
        }
    }
    pool_finish(turn, phase, rows);
}

static void attend_rows(Context *c, int64_t layer, int64_t phase, Turn *turn)
{
    int64_t heads = c->model->num_kv_heads, piece;
    int64_t pieces = c->num_pieces * heads;
    while ((piece = pool_take(turn, phase, pieces)) >= 0) {
        int64_t first_row = c->piece_rows[piece / heads];
        attend_piece(&c->job.attention, find_segment(c, first_row), layer, piece % heads, first_row,
            c->attention_scratch[turn->thread]);
    }
    pool_finish(turn, phase, pieces);
}

static void run_layer(Context *c, int64_t idx, int64_t phase, Turn *turn)
{
    const Layer *layer = c->model->layers + idx;
    norm_rows(c, layer->attention_norm, &layer->qkv_update, phase, turn);
    multiply(c, &layer->qkv, &c->hidden_rows, TO_QKV, phase + 1, turn);
    stage_rows(c, idx, phase + 2, turn);
    attend_rows(c, idx, phase + 3, turn);
    quantise_rows(c, ATTENDED, &layer->output_update, phase + 4, turn);
    multiply(c, &layer->output, &c->attended_rows, TO_X, phase + 5, turn);
    norm_rows(c, layer->mlp_norm, &layer->gate_up_update, phase + 6, turn);
    multiply(c, &layer->gate_up, &c->hidden_rows, TO_EXPANDED, phase + 7, turn);
    quantise_rows(c, EXPANDED, &layer->down_update, phase + 8, turn);
    multiply(c, &layer->down, &c->expanded_rows, TO_X, phase + 9, turn);
}

static void run_pass(void *argument, Turn *turn)
{
    Context *c = argument;
    const Model *m = c->model;
    int64_t row, width = padded_hidden(m), rows = c->job.pass.num_rows;
    while ((row = pool_take(turn, 0, rows)) >= 0) {
        int64_t stride = c->job.attention.visible_stride;
        const Segment *segment = find_segment(c, row);
        build_visible(segment, row - segment->first_row, c->visible + row * stride, stride, c->row_ends + row);
    }
    pool_finish(turn, 0, rows);
    for (int64_t idx = 0; idx < m->num_layers; idx++) run_layer(c, idx, 2 + PHASES_OF_LAYER * idx, turn);
    while ((row = pool_take(turn, 1, rows)) >= 0) {
        float *x = c->job.pass.x + row * width;
        normalise_row(x, m->final_norm, x, m->hidden_size, width, m->norm_eps);
    }
    pool_finish(turn, 1, rows);
}

static void run_logits(void *argument, Turn *turn)
{
    Context *c = argument;
    quantise_rows(c, HIDDEN, NULL, 0, turn);
    multiply(c, &c->model->head, &c->hidden_rows, TO_LOGITS, 1, turn);
}

static int64_t most_extra(const Model *model)
{
    int64_t most = 0;
    for (int64_t idx = 0; idx < model->num_layers; idx++) {
        const Layer *layer = model->layers + idx;
        const Matrix *all[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
        for (int i = 0; i < 4; i++) most = all[i]->num_extra > most ? all[i]->num_extra : most;
    }
    return most;
}

/* What Python calls. */

Context *ar2_open(const Model *model, int64_t num_threads)
{
    Context *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->model = model;
    c->max_extra = most_extra(model);
    c->pool = pool_open((int)num_threads);
    c->attention_scratch = calloc(num_threads, sizeof(float *));
    if (c->pool && c->attention_scratch) return c;
    pool_close(c->pool);
    free(c->attention_scratch);
    free(c);
    return NULL;
}

void ar2_close(Context *c)
{
    release(c);
    pool_close(c->pool);
    free(c->attention_scratch);
    free(c);
}

/* Whose each row is, and pieces of attention; returns the width of the rows of `visible`. */
static int64_t plan_rows(Context *c)
{
    const Pass *pass = &c->job.pass;
    int64_t width = 0;
    c->num_pieces = 0;
    for (int64_t idx = 0; idx < pass->num_segments; idx++) {
        const Segment *segment = pass->segments + idx;
        int64_t wide = round_up(segment->prefix_len % LANES + segment->num_rows, LANES);
        width = wide > width ? wide : width;
        for (int64_t row = 0; row < segment->num_rows; row++) {
            c->row_segments[segment->first_row + row] = idx;
            if (row % ATTENTION_ROWS == 0) c->piece_rows[c->num_pieces++] = segment->first_row + row;
        }
    }
    return width;
}

/* 0, or 1 where memory is short. */
int64_t ar2_forward(Context *c, const Pass *pass)
{
    int64_t num_keys = 0;
    pool_begin(c->pool, 2 + PHASES_OF_LAYER * c->model->num_layers);
    for (int64_t idx = 0; idx < pass->num_segments; idx++) {
        int64_t keys = pass->segments[idx].prefix_len + pass->segments[idx].num_rows;
        num_keys = keys > num_keys ? keys : num_keys;
    }
    if (!reserve(c, pass->num_rows, num_keys)) return 1;
    c->job.pass = *pass;
    c->job.attention = (Attention){c->model, &c->job.pass, c->qkv, padded_qkv(c->model), c->attended,
        padded_heads(c->model), c->visible, c->row_ends, plan_rows(c)};
    pool_run(c->pool, run_pass, c);
    return 0;
}

int64_t ar2_logits(Context *c, const float *hidden, int64_t num_rows, float *out)
{
    const Model *m = c->model;
    pool_begin(c->pool, 2);
    if (!reserve(c, num_rows, 1)) return 1;
    c->job.pass = (Pass){.num_rows = num_rows};
    c->job.hidden = hidden;
    c->job.logits = (Target){out, m->vocab_size, m->vocab_size, STORE, 0, m->logit_scale};
    pool_run(c->pool, run_logits, c);
    return 0;
}

/* One product, for tests and measurements: out = x @ weights. */
int64_t ar2_multiply(const Matrix *matrix, const float *x, int64_t num_rows, float *out, int64_t num_columns)
{
    Rows rows;
    int good = open_rows(&rows, num_rows, matrix->num_groups * GROUP, 0);
    Target to = {out, num_columns, num_columns, STORE, 0, 1.0f};
    if (good) {
        for (int64_t row = 0; row < num_rows; row++) quantise_row(x + row * matrix->num_groups * GROUP, row, &rows);
        for (int64_t tile = 0; tile < matrix->num_tiles; tile++) multiply_tile(matrix, tile, &rows, num_rows, &to);
    }
    close_rows(&rows);
    return !good;
}

int64_t ar2_group(void) { return GROUP; }
int64_t ar2_uses_byte_products(void) { return AR2_AVX512 || AR2_AVX2; }
