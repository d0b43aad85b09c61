/* The layers of a Llama-like decoder: all of them for rows that stand alone (`decode_tokens`), by one team of threads, and what
 * stands between the products of a layer for blocks of rows (`between`), whose products and attention are others'.
 *
 * Each layer is: RMS norm, queries, keys and values, an RMS norm of every head where the model has one, rotation, keys and
 * values to their slots, attention (stream.c), output product, residual, RMS norm, gate and up, SiLU(gate) * up,
 * down, residual. The last one is followed by the decoder's own norm. The threads share the work of each part and wait for
 * each other behind it. In bf16, numbers are rounded where the model written in torch's operations rounds them.
 *
 * Products of more than a few rows are linear_tiles.c's where the processor has a matrix unit.
 *
 * decoder.py compiles this file with the options of both files below, and fills the tables.
 */
#include "stream.c"

#include "linear.c"

#define RUN 1024 /* numbers of an activation that one thread computes in a row */

typedef struct {
  const number *weight, *bias; /* null: no bias */
} Product;

/* A row of the table that decoder.py: DecoderLayers fills. Norms of heads are null in models without them. */
typedef struct {
  const number *before_attention;
  Product query, key, value;
  const number *query_norm, *key_norm;
  Product output;
  const number *before_gate;
  Product gate, up, down;
} Layer;

/* A product of blocks of rows on the processor's matrix unit, as linear_tiles.c takes it. */
typedef struct {
  const number *weight, *bias;
  number *out;
  int64_t outputs;
} BlockProduct;

/* decoder.py: UnitStruct. Functions of linear_tiles.c; null where it does not serve this model. */
typedef struct {
  void (*start)(void), (*stop)(void);
  void (*pack)(const number *x, int64_t rows, int64_t inputs, void *packed);
  void (*multiply)(const BlockProduct *by, const void *packed, int64_t rows, int64_t inputs, void *carried);
  int64_t few_rows; /* rows that linear.c multiplies sooner */
} Unit;

/* decoder.py: DecoderStruct. */
typedef struct {
  Unit unit;
  int64_t layers, hidden, heads, kv_heads, inner, half; /* half: pairs (i, i + half) of a head that turn */
  const Layer *layer;
  const number *last_norm;
  float epsilon, head_epsilon, scale; /* scale: of attention scores */
} Decoder;

/* decoder.py: PassStruct. From `normed` on it is memory to work in. */
typedef struct {
  const Step *step; /* null in blocks */
  int64_t rows, threads;
  number *state, *out;        /* [rows, hidden] inputs of the first layer, overwritten; results */
  const float *cosine, *sine; /* [rows, half] */
  kept *memory;
  const int64_t *slots;  /* [layers, 2, kv_heads, rows] where keys and values go, in heads from the memory's begin */
  const int64_t *places; /* or [rows, 4]: address of layer 0 and key head 0 (0: not written), and distances to the next
                          * layer, from keys to values and to the next head, in numbers */
  number *normed, *product;     /* [rows, hidden] */
  number *query, *attended;     /* [rows, heads, DIM] */
  number *key, *value;          /* [rows, kv_heads, DIM] */
  number *gate, *up;            /* [rows, inner] */
  float *sums;                  /* [rows, heads, DIM]; the same memory as `attended` in fp32 */
  void *packed, *carried;       /* of linear_tiles.c */
} Pass;

/* The first `left` of LANES numbers; zeros behind them. */
INLINE vec some(const float *p, int64_t left) {
  vec x = {0};
  if (left >= LANES)
    memcpy(&x, p, sizeof x);
  else
    memcpy(&x, p, sizeof(float) * left);
  return x;
}

/* Numbers [0, LANES) at p; zeros behind the last one of `left`. */
INLINE vec several(const number *p, int64_t left) {
  halves x = {0};
  if (left >= LANES)
    memcpy(&x, p, sizeof x);
  else
    memcpy(&x, p, sizeof(number) * left);
  return widen(x);
}

#if BFLOAT16
/* To the nearest, ties to even, as `narrow` does. */
INLINE halves narrow_all(vec x) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const bits nan = (bits)(x != x), b = (bits)x;
  return __builtin_convertvector((((b + 0x7fff + ((b >> 16) & 1)) >> 16) & ~nan) | (0x7fc0 & nan), halves);
#endif
}
#else
INLINE halves narrow_all(vec x) { return x; }
#endif

INLINE void keep(number *p, vec x, int64_t left) {
  const halves y = narrow_all(x);
  if (left >= LANES)
    memcpy(p, &y, sizeof y);
  else
    memcpy(p, &y, sizeof(number) * left);
}

/* x as it is after it has been kept. */
INLINE vec rounded_all(vec x) { return widen(narrow_all(x)); }

/* RMS norm of n numbers, to which those at `added` are added first unless it is null. `to` may be `from`. */
static void normalize(number *from, const number *added, const number *weight, int64_t n, float epsilon, number *to) {
  vec squares = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vec x = several(from + i, n - i);
    if (added) {
      x = rounded_all(x + several(added + i, n - i));
      keep(from + i, x, n - i);
    }
    squares += x * x;
  }
  const float factor = 1 / sqrtf(sum(squares) / n + epsilon);
  for (int64_t i = 0; i < n; i += LANES)
    keep(to + i, rounded_all(several(from + i, n - i) * factor) * several(weight + i, n - i), n - i);
}

/* All rows; with `residual` the last product is added to them first. */
static void normalize_rows(const Decoder *d, const Pass *p, int residual, const number *weight, number *to) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < p->rows; row++)
    normalize(p->state + row * d->hidden, residual ? p->product + row * d->hidden : 0, weight, d->hidden, d->epsilon,
              to + row * d->hidden);
}

/* Whether the rows of a step are multiplied as a block, on the matrix unit. */
INLINE int is_block(const Decoder *d, const Pass *p) { return d->unit.multiply && p->rows > d->unit.few_rows; }

/* Makes rows ready for the products that follow, when all threads have written them. */
static void prepare(const Decoder *d, const Pass *p, const number *x, int64_t inputs) {
  if (is_block(d, p)) d->unit.pack(x, p->rows, inputs, p->packed);
}

/* A product of rows that are ready. The threads do not wait for each other at its end. */
static void product(const Decoder *d, const Pass *p, Product by, const number *x, int64_t inputs, number *out,
                    int64_t outputs) {
  if (is_block(d, p)) {
    const BlockProduct all = {by.weight, by.bias, out, outputs};
    d->unit.multiply(&all, p->packed, p->rows, inputs, p->carried);
  } else {
    multiply_together(by.weight, by.bias, x, inputs, out, outputs, p->rows, outputs, inputs);
  }
}

/* Rotates a head by the position of its row. */
static void turn(const Decoder *d, const Pass *p, int64_t row, number *head) {
  const float *cosine = p->cosine + row * d->half, *sine = p->sine + row * d->half;
  for (int64_t i = 0; i < d->half; i += LANES) {
    const int64_t left = d->half - i;
    const vec a = several(head + i, left), b = several(head + d->half + i, left);
    const vec c = some(cosine + i, left), s = some(sine + i, left);
    keep(head + i, rounded_all(a * c) - rounded_all(b * s), left);
    keep(head + d->half + i, rounded_all(b * c) + rounded_all(a * s), left);
  }
}

/* Where a row's numbers of a layer go, of its key heads (`kv` from 0) and value heads (from kv_heads); null: nowhere. */
INLINE kept *place_of(const Decoder *d, const Pass *p, int64_t number_of_layer, int64_t kv, int64_t row) {
  if (!p->places) return p->memory + p->slots[(number_of_layer * 2 * d->kv_heads + kv) * p->rows + row] * DIM;
  const int64_t *at = p->places + 4 * row, is_value = kv >= d->kv_heads;
  if (!at[0]) return 0;
  return (kept *)at[0] + number_of_layer * at[1] + is_value * at[2] + (kv - is_value * d->kv_heads) * at[3];
}

/* Norms and rotation of a layer's queries and keys; keys and values go to their slots. */
static void place_heads(const Decoder *d, const Pass *p, int64_t number_of_layer) {
  const Layer *layer = d->layer + number_of_layer;
  const int64_t each = d->heads + 2 * d->kv_heads;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < p->rows * each; i++) {
    const int64_t row = i / each, head = i % each, kv = head - d->heads; /* from 0: keys, from kv_heads: values */
    number *own = kv < 0             ? p->query + (row * d->heads + head) * DIM
                  : kv < d->kv_heads ? p->key + (row * d->kv_heads + kv) * DIM
                                     : p->value + (row * d->kv_heads + kv - d->kv_heads) * DIM;
    if (kv < d->kv_heads) {
      const number *norm = kv < 0 ? layer->query_norm : layer->key_norm;
      if (norm) normalize(own, 0, norm, DIM, d->head_epsilon, own);
      turn(d, p, row, own);
    }
    kept *to = kv < 0 ? 0 : place_of(d, p, number_of_layer, kv, row);
    if (to) keep_head(to, own);
  }
}

/* Attention of all rows over their spans, to `attended`. */
static void attend_rows(const Decoder *d, const Pass *p, int64_t number_of_layer) {
  const int64_t width = d->heads * DIM;
  attend_together(p->step, number_of_layer, p->query, DIM, width, d->scale, 0, 0, p->sums);
#pragma omp barrier
#if BFLOAT16
#pragma omp for schedule(static)
  for (int64_t i = 0; i < p->rows * width; i += DIM)
    for (int64_t j = 0; j < DIM; j += LANES) keep(p->attended + i + j, some(p->sums + i + j, DIM - j), DIM - j);
#endif
}

/* gate = SiLU(gate) * up, where SiLU(x) = x / (1 + exp(-x)); of e^x only those with x <= 0 are computed. */
static void activate(const Decoder *d, const Pass *p) {
  const int64_t all = p->rows * d->inner;
#pragma omp for schedule(static)
  for (int64_t from = 0; from < all; from += RUN) {
    const int64_t end = from + RUN < all ? from + RUN : all;
    for (int64_t i = from; i < end; i += LANES) {
      const vec x = several(p->gate + i, end - i);
      const ints positive = x > 0;
      const vec e = power((vec)((ints)x | INT32_MIN) * LOG2E), one = (vec){0} + 1.0f;
      const vec over = (vec)(((ints)one & positive) | ((ints)e & ~positive));
      keep(p->gate + i, rounded_all(x * (over / (1.0f + e))) * several(p->up + i, end - i), end - i);
    }
  }
}

static void run_layer(const Decoder *d, const Pass *p, int64_t number_of_layer) {
  const Layer *layer = d->layer + number_of_layer;
  const int64_t width = d->heads * DIM, kv_width = d->kv_heads * DIM;
  normalize_rows(d, p, number_of_layer > 0, layer->before_attention, p->normed);
  prepare(d, p, p->normed, d->hidden);
  product(d, p, layer->query, p->normed, d->hidden, p->query, width);
  product(d, p, layer->key, p->normed, d->hidden, p->key, kv_width);
  product(d, p, layer->value, p->normed, d->hidden, p->value, kv_width);
#pragma omp barrier
  place_heads(d, p, number_of_layer);
  attend_rows(d, p, number_of_layer);
  prepare(d, p, p->attended, width);
  product(d, p, layer->output, p->attended, width, p->product, d->hidden);
#pragma omp barrier
  normalize_rows(d, p, 1, layer->before_gate, p->normed);
  prepare(d, p, p->normed, d->hidden);
  product(d, p, layer->gate, p->normed, d->hidden, p->gate, d->inner);
  product(d, p, layer->up, p->normed, d->hidden, p->up, d->inner);
#pragma omp barrier
  activate(d, p);
  prepare(d, p, p->gate, d->inner);
  product(d, p, layer->down, p->gate, d->inner, p->product, d->hidden);
#pragma omp barrier
}

/* Whether there is so much to do that more than one thread is faster. */
static int is_large(const Decoder *d, const Pass *p) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < p->step->sections; i++) tokens += p->step->section[i].tokens;
  const int64_t widest = d->inner > d->heads * DIM ? d->inner : d->heads * DIM;
  return d->hidden * widest > SMALL || tokens * d->kv_heads * DIM > SMALL;
}

/* All layers and the last norm, by the threads of a team. */
static void run_layers(const Decoder *d, const Pass *p) {
  for (int64_t layer = 0; layer < d->layers; layer++) run_layer(d, p, layer);
  normalize_rows(d, p, 1, d->last_norm, p->out);
}

/* A thread of a team is about to run layers, or is done with them. */
static void begin(const Decoder *d, const Pass *p) {
  if (is_block(d, p)) d->unit.start();
}
static void end(const Decoder *d, const Pass *p) {
  if (is_block(d, p)) d->unit.stop();
}

/* What stands before and behind the layers; decoder.py: EndsStruct. */
typedef struct {
  const number *embedding; /* [vocabulary, hidden] */
  Product head;
  int64_t outputs; /* of the head */
} Ends;

/* A step from the rows' tokens to their logits [rows, outputs]. */
void decode_tokens(const Decoder *d, const Pass *p, const Ends *ends, const int64_t *token, number *logits) {
#pragma omp parallel num_threads(p->threads) if (is_large(d, p) || d->hidden * ends->outputs > SMALL)
  {
    begin(d, p);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < p->rows; row++)
      memcpy(p->state + row * d->hidden, ends->embedding + token[row] * d->hidden, sizeof(number) * d->hidden);
    run_layers(d, p);
    prepare(d, p, p->out, d->hidden);
    product(d, p, ends->head, p->out, d->hidden, logits, ends->outputs);
    end(d, p);
  }
}

/* What stands between the products of a layer, for blocks of rows; decoder.py: BlockPart. */
enum { BEFORE_ATTENTION, HEADS, BEFORE_GATE, ACTIVATION, LAST };

void between(const Decoder *d, const Pass *p, int64_t part, int64_t number_of_layer) {
  const Layer *layer = d->layer + number_of_layer;
#pragma omp parallel num_threads(p->threads) if (p->rows * d->inner > SMALL)
  switch (part) {
    case BEFORE_ATTENTION: normalize_rows(d, p, number_of_layer > 0, layer->before_attention, p->normed); break;
    case HEADS: place_heads(d, p, number_of_layer); break;
    case BEFORE_GATE: normalize_rows(d, p, 1, layer->before_gate, p->normed); break;
    case ACTIVATION: activate(d, p); break;
    case LAST: normalize_rows(d, p, 1, d->last_norm, p->out); break;
  }
}
