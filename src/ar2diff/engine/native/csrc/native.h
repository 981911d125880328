/* What Python hands over, and the parts of a forward pass. Mirrored by engine/native/library.py.
 *
 * All arrays of floats per row are padded with zeros to a multiple of GROUP. A row's numbers never depend on the
 * other rows, on how many there are, or on the number of threads: work is split over rows, heads and output channels,
 * never inside a sum.
 */
#ifndef AR2_NATIVE_H
#define AR2_NATIVE_H

#include <stdint.h>

#ifndef GROUP
#define GROUP 32 /* inputs that share a scale */
#endif
#define TILE 32 /* output channels of a packed tile */
#define TILE_BYTES (TILE * GROUP + TILE * 2)

enum { SILU, GELU, GELU_TANH };

/* int8 weights: for each tile of outputs and group of inputs, TILE * GROUP bytes (weight + 128; four inputs of one
 * output side by side) and TILE bfloat16 scales. `num_extra` more groups follow in each tile: an adapter's up
 * matrices, whose inputs are what its down matrices made of the row. Passes with gated rows multiply them too. */
typedef struct {
    const uint8_t *tiles;
    const float *bias; /* or NULL; padded */
    int64_t num_tiles, num_groups, num_extra;
} Matrix;

typedef struct {
    Matrix qkv, output, gate_up, down; /* gate_up: tiles of 16 gate and 16 up channels */
    Matrix qkv_update, output_update, gate_up_update, down_update; /* an adapter's down matrices; or no tiles */
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm; /* or NULL; over head_dim */
    int64_t rotary;
} Layer;

typedef struct {
    const Layer *layers;
    Matrix head;
    const float *final_norm;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, vocab_size, activation;
    double norm_eps;
    float softmax_scale, residual_scale, logit_scale;
} Model;

/* The rows of one sequence. Key k of it lies at place pages[k / page_size] * page_size + k % page_size. */
typedef struct {
    int64_t first_row, num_rows, prefix_len;
    const uint8_t *mask;        /* (rows, rows), 1 sees; NULL where all see all */
    const int64_t *pages;
} Segment;

typedef struct {
    int64_t num_rows, num_segments;
    const Segment *segments;    /* all rows, in order */
    float *x;                   /* (rows, padded hidden): embeddings in, final hidden states out */
    const float *cos, *sin;     /* (rows, head_dim / 2) */
    const uint8_t *gate;        /* (rows), 1 gets the adapter's updates; NULL where none does */
    float *keys, *values;       /* the store: (layers, kv heads, capacity, head_dim) */
    int64_t capacity, page_size; /* in tokens; whole tiles of LANES keys lie in a page */
} Pass;

/* int8 rows: value = bytes * scales[group]. `shifts` is -128 times the sum of the group's bytes: it undoes the
 * shift of the weights. */
typedef struct {
    int8_t *bytes;
    float *scales;
    int32_t *shifts;
    int64_t num_groups, stride; /* groups of a row, and from one row to the next */
} Rows;

/* Where a product goes: `out` row r starts at out + r * stride. */
enum { STORE, ADD, GATED };
typedef struct {
    float *out;
    int64_t stride, num_columns;
    int kind, activation;
    float scale; /* ADD: out += scale * product; STORE: out = scale * product */
} Target;

void quantise_row(const float *x, int64_t row, const Rows *rows);
void extend_row(const Matrix *update, int is_gated, int64_t row, const Rows *rows, float *low);
void normalise_row(const float *x, const float *weight, float *out, int64_t size, int64_t padded, double eps);
void rotate_head(float *x, const float *cos, const float *sin, int64_t head_dim);
void multiply_tile(const Matrix *matrix, int64_t tile, const Rows *rows, int64_t num_rows, const Target *target);

typedef struct {
    const Model *model;
    const Pass *pass;
    const float *qkv;
    int64_t qkv_stride;
    float *out;
    int64_t out_stride;
    const int32_t *visible;  /* (rows, visible_stride): -1 where seen, from the first tile with new keys on */
    const int64_t *row_ends; /* keys from here on are not seen */
    int64_t visible_stride;
} Attention;

#define MAX_HEAD_DIM 1024 /* with head norms */
#define ATTENTION_ROWS 8 /* rows of one piece of attention work */
int64_t attention_scratch_floats(const Model *model, int64_t num_keys);
void attend_piece(
    const Attention *work, const Segment *segment, int64_t layer, int64_t kv_head, int64_t first_row, float *scratch);
int64_t find_place(const Pass *pass, const Segment *segment, int64_t key);
void build_visible(const Segment *segment, int64_t row, int32_t *visible, int64_t visible_len, int64_t *row_end);

#endif
