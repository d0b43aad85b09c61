/* Span attention of blocks of rows on the CPU: each row's softmax over all of its spans, in one pass.
 *
 * A task is a block of rows and one key head. It goes over the calls that have some of its rows, in their order, and
 * carries each row's maximum, total and weighted values from one to the next (online softmax as in FlashAttention, Dao et
 * al., 2022), so that nothing has to be merged. The heads of a group that share the key head are rows of their own (row by
 * row, so that a block's rows see about the same keys). Keys come in tiles of TILE: a tile is transposed, and then STRIP
 * rows at a time go over it, with their scores in registers. Products are computed in fp32. A row's result depends neither
 * on the rows beside it nor on the number of threads.
 *
 * block_spans.py compiles this file for a machine and a model, as stream.c; needs GCC 12 or newer and OpenMP.
 */
#include "vectors.h"

#ifdef __AVX512F__
#define WIDTH 4 /* vectors beside each other: 24 sums in 32 registers */
#else
#define WIDTH 2 /* 12 sums in 16 registers */
#endif
#define STRIP 6
#define TILE 64   /* keys */
#define BLOCK 192 /* most rows of a task, in all heads of a group */
#define PADDED (PARTS * LANES)
#define COLUMNS (WIDTH * LANES)

#include "calls.h"

#define ROWS (BLOCK + STRIP) /* a block's rows, and those that fill its last strip */

/* What a thread works in: a tile's keys and values, and the state of a block's rows. */
typedef struct {
  float keys[PADDED * TILE];    /* [number, token] */
  float values[TILE * PADDED];  /* [token, number] */
  float query[ROWS * PADDED], sum[ROWS * PADDED];
  float total[ROWS * LANES];     /* of the weights, in parts */
  float most[ROWS];              /* maximum (base 2) */
  int64_t from[ROWS], to[ROWS];  /* tokens of a call that each row sees */
} __attribute__((aligned(64))) Work;

INLINE void store(float *p, vec x) { memcpy(p, &x, sizeof x); }

/* Transposes LANES vectors: every round moves one bit of a number's place from the column to the row. */
INLINE void transpose(vec *a) {
  vec b[LANES];
#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define ROUNDS 4
#else
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define ROUNDS 3
#endif
#pragma GCC unroll 4
  for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + LANES / 2], LOW);
      b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + LANES / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = b[i];
  }
}

/* Tokens [first, first + count) of a call to the tile; behind them come zeros. */
static void pack(Work *w, const Call *c, const kept *keys, const kept *values, int64_t first, int count) {
  for (int t = 0; t < TILE; t += LANES)
    for (int i = 0; i < PARTS; i++) {
      vec a[LANES] = {{0}};
      for (int j = 0; j < LANES && t + j < count; j++) {
        const int64_t slot = c->slots ? c->slots[first + t + j] : first + t + j;
        a[j] = kept_part(keys + slot * c->token, i);
        store(w->values + (t + j) * PADDED + i * LANES, kept_part(values + slot * c->token, i));
      }
      transpose(a);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) store(w->keys + (i * LANES + j) * TILE + t, a[j]);
    }
}

/* Scores of a strip's rows for columns [column, column + COLUMNS) of the tile. */
INLINE void products(const Work *w, int row, int column, float *scores) {
  vec score[STRIP][WIDTH] = {{{0}}};
  const float *query = w->query + row * PADDED;
  for (int d = 0; d < DIM; d++) {
    vec key[WIDTH];
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) key[j] = load(w->keys + d * TILE + column + j * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP; r++) {
      const float number = query[r * PADDED + d];
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; j++) score[r][j] += key[j] * number;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) store(scores + r * TILE + column + j * LANES, score[r][j]);
}

/* Parts [from, from + width) of a strip's sums, faded, plus the tile's values weighted by `weights [STRIP, TILE]`. */
INLINE void weighted(Work *w, int row, const int from, const int width, int count, const float *weights,
                     const float *fade) {
  vec sum[STRIP][WIDTH];
  float *const out = w->sum + row * PADDED + from * LANES;
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < width; i++) sum[r][i] = load(out + r * PADDED + i * LANES) * fade[r];
  for (int t = 0; t < count; t++) {
    vec value[WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < width; i++) value[i] = load(w->values + t * PADDED + (from + i) * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP; r++) {
      const float weight = weights[r * TILE + t];
#pragma GCC unroll 4
      for (int i = 0; i < width; i++) sum[r][i] += value[i] * weight;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < width; i++) store(out + r * PADDED + i * LANES, sum[r][i]);
}

/* The largest lane of x, in all lanes. */
INLINE vec largest(vec x) {
#if LANES == 16
  x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return larger(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return larger(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
}

/* The weights of a strip's rows, in place of their scores, and what their sums fade by. */
INLINE void weigh(Work *w, int row, float *scores, float *fade) {
  vec now[STRIP], base[STRIP], change = {0};
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++) {
    now[r] = w->most[row + r] - (vec){0};
#pragma GCC unroll 8
    for (int t = 0; t < TILE; t += LANES) now[r] = larger(load(scores + r * TILE + t), now[r]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++) {
    now[r] = largest(now[r]);
    base[r] = larger(now[r], (vec){0} - 3e38f); /* a row that has seen nothing yet has no maximum */
    change[r] = w->most[row + r] - base[r][0];
    w->most[row + r] = now[r][0];
  }
  change = power(change);
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++) {
    vec total = load(w->total + (row + r) * LANES) * change[r];
#pragma GCC unroll 8
    for (int t = 0; t < TILE; t += LANES) {
      const vec weight = power(load(scores + r * TILE + t) - base[r]);
      store(scores + r * TILE + t, weight);
      total += weight;
    }
    store(w->total + (row + r) * LANES, total);
    fade[r] = change[r];
  }
}

/* A strip's rows over the tile of tokens [first, first + count). */
static void strip(Work *w, int row, int64_t first, int count) {
  float scores[STRIP * TILE] __attribute__((aligned(64))), fade[STRIP];
#pragma GCC unroll 4
  for (int column = 0; column < TILE; column += COLUMNS) products(w, row, column, scores);
  for (int r = 0; r < STRIP; r++) {
    const int64_t from = w->from[row + r] - first, to = w->to[row + r] - first;
    if (from > 0 || to < TILE || count < TILE)
      for (int t = 0; t < TILE; t++)
        if (t < from || t >= to || t >= count) scores[r * TILE + t] = -INFINITE;
  }
  weigh(w, row, scores, fade);
#pragma GCC unroll 32
  for (int from = 0; from < PARTS; from += WIDTH)
    weighted(w, row, from, PARTS - from < WIDTH ? PARTS - from : WIDTH, count, scores, fade);
}

/* A query, scaled and rotated by minus the span's base, with zeros behind its last number. */
static void rotated(const Step *step, int64_t angle, const number *from, float scale, float *to) {
  for (int i = 0; i < PARTS; i++) store(to + i * LANES, part(from, i) * scale);
  if (angle < 0) return;
  const float *cosine = step->cosine + angle * step->half, *sine = step->sine + angle * step->half;
  const int64_t pair = step->interleaved ? 1 : step->half, next = step->interleaved ? 2 : 1;
  to += step->turned;
  for (int64_t i = 0; i < step->half; i++) {
    float *a = to + i * next, *b = a + pair;
    const float x = *a, y = *b;
    *a = x * cosine[i] - y * sine[i];
    *b = y * cosine[i] + x * sine[i];
  }
}

/* The rows of a block that a call has, [begin, begin + count) in all heads of the group, over its tokens. */
static void over_span(const Step *step, const Layer *l, Work *w, const Call *c, int64_t kv_head, int64_t block_first,
                      int64_t block_end) {
  const int64_t group = step->heads / step->kv_heads, offset = l->layer * c->layer + kv_head * c->head;
  const int64_t first = c->first > block_first ? c->first : block_first, end = c->end < block_end ? c->end : block_end;
  const int begin = (int)((first - block_first) * group), count = (int)((end - first) * group);
  int64_t least = c->tokens, most = 0;
  for (int i = begin; i < begin + count + STRIP; i++) {
    const int64_t row = block_first + i / group, head = kv_head * group + i % group;
    w->from[i] = w->to[i] = 0; /* rows behind the call's see nothing of it */
    if (i >= begin + count) continue;
    rotated(step, c->angle, l->query + head * l->head_stride + row * l->row_stride, l->scale * LOG2E,
            w->query + i * PADDED);
    w->from[i] = c->hidden ? c->hidden[row - c->first] : 0;
    w->to[i] = c->causal ? row - c->first + 1 : c->tokens;
    least = w->from[i] < least ? w->from[i] : least;
    most = w->to[i] > most ? w->to[i] : most;
  }
  for (int64_t t = least / TILE * TILE; t < most; t += TILE) {
    const int tokens = c->tokens - t < TILE ? (int)(c->tokens - t) : TILE;
    pack(w, c, c->keys + offset, c->values + offset, t, tokens);
    for (int row = begin; row < begin + count; row += STRIP) {
      int is_seen = 0;
      for (int r = row; r < row + STRIP; r++) is_seen |= w->to[r] > t && w->from[r] < t + tokens;
      if (is_seen) strip(w, row, t, tokens);
    }
  }
}

static void task(const Step *step, const Layer *l, Work *w, int64_t kv_head, const Block *block) {
  const int64_t group = step->heads / step->kv_heads;
  const int count = (int)((block->end - block->first) * group);
  for (int i = 0; i < count + STRIP; i++) {
    const int64_t head = kv_head * group + i % group;
    w->most[i] = l->sinks ? l->sinks[head] * LOG2E : -INFINITE; /* a sink has a weight and no value */
    store(w->total + i * LANES, (vec){l->sinks ? 1 : 0});
  }
  memset(w->sum, 0, sizeof(float) * (count + STRIP) * PADDED);
  for (int64_t i = block->calls; i < block->calls_end; i++)
    over_span(step, l, w, step->call + step->order[i], kv_head, block->first, block->end);
  for (int i = 0; i < count; i++) {
    const int64_t row = block->first + i / group, head = kv_head * group + i % group;
    float *out = l->out + (row * step->heads + head) * DIM, total = 0;
    for (int t = 0; t < LANES; t++) total += w->total[i * LANES + t];
    for (int d = 0; d < DIM; d++) out[d] = w->sum[i * PADDED + d] / total;
  }
}

void attend_blocks(const Step *step, const Layer *l) {
  const int64_t tasks = step->blocks * step->kv_heads;
#pragma omp parallel num_threads(step->threads)
  {
    Work w;
    memset(&w, 0, sizeof w); /* what fills the last strip is computed with, if not kept */
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++) /* head by head, so that its keys stay in the cache; the last rows see most */
      task(step, l, &w, i / step->blocks, step->block + (step->blocks - 1 - i % step->blocks));
  }
}
