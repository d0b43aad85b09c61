/* The tables of a step's blocks of rows, as block_spans.py fills them. For files that have the dtypes of queries (`number`)
 * and of keys and values (`kept`).
 */
/* A row of the table that block_spans.py: BlockSpans fills. Addresses are of layer 0 and key head 0; distances count
 * numbers. */
typedef struct {
  const kept *keys, *values;
  int64_t layer, head, token;  /* distances */
  int64_t first, end;          /* rows of the step */
  int64_t tokens, causal;      /* with `causal` row `first + i` sees i + 1 of them */
  int64_t angle;               /* index into cosine and sine; -1: queries are not rotated */
  const int64_t *slots;        /* [tokens] where each token lies; null: 0, 1, 2... */
  const int64_t *hidden;       /* [end - first] first tokens that each row does not see; null: none */
} Call;

/* Rows of a task, and calls [calls, calls_end) of `order`, which have some of them. */
typedef struct {
  int64_t first, end, calls, calls_end;
} Block;

/* block_spans.py: _BlocksStruct. */
typedef struct {
  int64_t heads, kv_heads, half, interleaved, turned, threads, blocks; /* turned: first dimension that turns */
  const Call *call;
  const Block *block;
  const int64_t *order;
  const float *cosine, *sine; /* [angles, half] */
} Step;

/* What a layer brings (block_spans.py: _QueriesStruct). `query` has numbers at [head * head_stride + row * row_stride + i];
 * `out [rows, heads, DIM]`. */
typedef struct {
  int64_t layer, head_stride, row_stride;
  const number *query;
  const float *sinks; /* [heads], or null */
  float *out;
  float scale;
} Layer;
