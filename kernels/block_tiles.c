/* Span attention of blocks of rows in bf16 on a processor with a matrix unit: block_spans.c with products of tiles.
 *
 * A task is a block of rows and one key head, whose group of query heads are rows of their own, as there. Everything is
 * transposed: scores are K Q^T and sums V^T P^T, so that a row of attention is a column of tiles and a lane of vectors.
 * Then softmax works from vector to vector, never across one; keys are tiles as they lie in memory, and pairs of
 * neighbouring weights are what the unit wants of them. Only values are transposed, once for all rows of a block.
 *
 * Products are of bf16 numbers in fp32; weights are rounded to bf16, the rest is fp32. A row's sums are scaled to a new
 * maximum only once that is LAZY above the one they have, in powers of two, as FlashAttention-4 does: weights grow up to
 * 2^LAZY meanwhile, and most tiles need no scaling. A row's result depends neither on the rows beside it nor on the
 * number of threads.
 *
 * block_tiles.py compiles this file; DIM is the head's dimension.
 */
#include "tiles.h"

typedef uint16_t number, kept;
#include "calls.h"

#define PARTS ((DIM + DEPTH - 1) / DEPTH) /* runs of 32 numbers of a head; zeros behind its last */
#define PADDED (PARTS * DEPTH)
#define KEYS 64                           /* of a tile of keys, which is several of the unit's */
#define STRIP (2 * SIDE)                  /* rows that are computed together */
#define BLOCK 384                         /* most rows of a task, in all heads of a group */
#define STRIPS (BLOCK / STRIP)
#define WEIGHED (2 * KEYS / SIDE)         /* tiles of weights of a strip */
#define LAZY 8.0f
#define LOG2E 1.44269504f
#define INFINITE __builtin_inff()

/* Some rows of a block; each vector, and each tile's columns, are one half of them. */
typedef struct {
  ints row[2];            /* counted from the block's first, in all heads of the group; -1: none */
  vec asked[PADDED][2];   /* queries */
  int64_t angle;          /* by which `query` is turned */
  Tile query[PARTS][2];   /* [pair of numbers, row] */
  Tile sum[2 * PARTS][2]; /* [number, row], fp32 */
  vec most[2], total[2];  /* maxima (base 2) to which sums and totals are scaled */
  ints from[2], to[2];    /* tokens of a call that each row sees */
} Strip;

/* What is computed of a strip over a tile. */
typedef struct {
  Tile scores[KEYS / SIDE][2];   /* [token, row], fp32 */
  Tile weights[KEYS / DEPTH][2]; /* [pair of tokens, row] */
} Stage;

typedef struct {
  Tile keys[KEYS / SIDE][PARTS];        /* [token, number] */
  Tile values[2 * PARTS][KEYS / DEPTH]; /* [number, token] */
  Stage stage[2];                       /* of every other strip */
  Strip strip[STRIPS];
} __attribute__((aligned(64))) Work;

INLINE int64_t slot_of(const Call *c, int64_t token) { return c->slots ? c->slots[token] : token; }

/* Numbers [part * DEPTH, ...) of a head as pairs; zeros behind its last. */
INLINE bits pairs_of(const kept *head, int part) {
  bits x = {0};
  const int left = DIM - part * DEPTH;
  memcpy(&x, head + part * DEPTH, sizeof(kept) * (left < DEPTH ? left : DEPTH));
  return x;
}

/* Tokens [first, first + count) of a call; behind them come zeros. */
static void pack(Work *w, const Call *c, const kept *keys, const kept *values, int64_t first, int count) {
  for (int t = 0; t < KEYS; t++) {
    const kept *key = keys + (t < count ? slot_of(c, first + t) : 0) * c->token;
    for (int p = 0; p < PARTS; p++) w->keys[t / SIDE][p].pair[t % SIDE] = t < count ? pairs_of(key, p) : (bits){0};
  }
  for (int k = 0; k < KEYS / DEPTH; k++)
    for (int p = 0; p < PARTS; p++) {
      bits low[SIDE], high[SIDE]; /* numbers 0, 2, 4... of the part, and the others */
      for (int i = 0; i < SIDE; i++) {
        const int t = k * DEPTH + 2 * i;
        bits even = {0}, odd = {0};
        if (t < count) even = pairs_of(values + slot_of(c, first + t) * c->token, p);
        if (t + 1 < count) odd = pairs_of(values + slot_of(c, first + t + 1) * c->token, p);
        low[i] = (even & 0xffff) | odd << 16; /* pairs of tokens instead of pairs of numbers */
        high[i] = even >> 16 | (odd & 0xffff0000);
      }
      transpose(low);
      transpose(high);
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++) { /* number 2i is row i of the first, and number 2i + 1 that of the other */
        w->values[2 * p + i / 8][k].pair[2 * i % SIDE] = low[i];
        w->values[2 * p + i / 8][k].pair[2 * i % SIDE + 1] = high[i];
      }
    }
}

/* The unit's tiles 0 to 3 are sums of two tiles a and two tiles b, [a][b]. */
INLINE void multiply(const Tile *a, const Tile *next_a, const Tile *b) {
  tile_load(4, a);
  tile_load(5, next_a);
  tile_load(6, b);
  tile_load(7, b + 1);
  tile_dot(0, 4, 6);
  tile_dot(1, 4, 7);
  tile_dot(2, 5, 6);
  tile_dot(3, 5, 7);
}

INLINE void keep_sums(Tile *to) {
  tile_store(0, to);
  tile_store(1, to + 1);
  tile_store(2, to + 2);
  tile_store(3, to + 3);
}

/* Adds one part of the numbers to the scores of a strip's rows for tokens [2 * SIDE * pair, ...) of the tile. */
INLINE void score(const Work *w, const Strip *s, Stage *to, const int pair, const int part) {
  if (!part) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
  }
  multiply(&w->keys[2 * pair][part], &w->keys[2 * pair + 1][part], s->query[part]);
  if (part == PARTS - 1) keep_sums(to->scores[2 * pair]);
}

/* Adds DEPTH of the tile's values, weighted, to numbers [part * DEPTH, ...) of a strip's sums. */
INLINE void sum(const Work *w, const Stage *from, Strip *s, const int part, const int k) {
  Tile *sums = s->sum[2 * part];
  if (!k) {
    tile_load(0, sums);
    tile_load(1, sums + 1);
    tile_load(2, sums + 2);
    tile_load(3, sums + 3);
  }
  multiply(&w->values[2 * part][k], &w->values[2 * part + 1][k], from->weights[k]);
  if (k == KEYS / DEPTH - 1) keep_sums(sums);
}

/* What the unit does while a strip is weighed, in STEPS: the scores of the next strip, then the sums of the last one
 * (null: none). */
#define SCORES (KEYS / STRIP * PARTS)
#define STEPS (SCORES + KEYS / DEPTH * PARTS)
typedef struct {
  const Strip *next;
  Strip *last;
  Stage *stage; /* of both */
} Beside;

INLINE void step_beside(const Work *w, const Beside *b, const int i) {
  if (i < SCORES) {
    if (b->next) score(w, b->next, b->stage, i / PARTS, i % PARTS);
  } else if (b->last)
    sum(w, b->stage, b->last, (i - SCORES) / (KEYS / DEPTH), (i - SCORES) % (KEYS / DEPTH));
}

/* Hides what the rows of a strip do not see of the tile that begins with token `first`. */
static void hide(Stage *at, const Strip *s, int64_t first) {
  for (int half = 0; half < 2; half++)
    for (int t = 0; t < KEYS; t++) {
      vec *score = &at->scores[t / SIDE][half].row[t % SIDE];
      const ints token = (ints){0} + (int32_t)(first + t);
      const ints seen = (s->from[half] <= token) & (s->to[half] > token);
      *score = (vec)(((ints)*score & seen) | ((ints)((vec){0} - INFINITE) & ~seen));
    }
}

/* What the scores of half a strip's rows make of their maxima, totals and sums. */
INLINE void raise_maxima(const Stage *at, Strip *s, const int half, float scale) {
  vec peak[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) peak[i] = at->scores[0][half].row[i];
#pragma GCC unroll 4
  for (int i = 0; i < KEYS / SIDE; i++)
#pragma GCC unroll 16
    for (int t = 0; t < SIDE; t++) peak[t % 4] = larger(at->scores[i][half].row[t], peak[t % 4]);
  vec most = larger(larger(peak[0], peak[1]), larger(peak[2], peak[3])) * scale;
  const ints is_new = most > s->most[half] + LAZY;
  if (!any(is_new)) return;
  most = (vec)(((ints)most & is_new) | ((ints)s->most[half] & ~is_new));
  const vec fade = power(s->most[half] - larger(most, (vec){0} - 3e38f));
  s->most[half] = most;
  s->total[half] *= fade;
  for (int p = 0; p < 2 * PARTS; p++)
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) s->sum[p][half].row[i] *= fade;
}

/* The weights of half a strip's rows for SIDE tokens. */
INLINE void weigh(Stage *at, Strip *s, const int half, const int tokens, float scale) {
  const vec base = larger(s->most[half], (vec){0} - 3e38f); /* a row that has seen nothing yet has no maximum */
  vec total = {0};
#pragma GCC unroll 8
  for (int t = 0; t < SIDE; t += 2) {
    const vec even = power(at->scores[tokens][half].row[t] * scale - base);
    const vec odd = power(at->scores[tokens][half].row[t + 1] * scale - base);
    total += even + odd;
    at->weights[tokens / 2][half].pair[(tokens % 2 * SIDE + t) / 2] = paired(even, odd);
  }
  s->total[half] += total;
}

/* Strips [begin, end) over the tile of tokens [first, first + count). While vectors weigh one strip, the unit computes the
 * scores of the next one and the sums of the one before. */
static void over_tile(Work *w, int begin, int end, int64_t first, int count, float scale) {
  const ints from = (ints){0} + (int32_t)first, to = from + count, behind = from + KEYS;
  Strip *seen[STRIPS + 3] = {0}; /* one that is none is before the first, and two are behind the last */
  int n = 0;
  for (int i = begin; i < end; i++) {
    Strip *s = w->strip + i;
    if (any((s->from[0] < to) & (s->to[0] > from)) || any((s->from[1] < to) & (s->to[1] > from))) seen[++n] = s;
  }
  if (!n) return;
  for (int i = 0; i < n + 2; i++) {
    Strip *s = seen[i];
    Stage *at = w->stage + i % 2;
    const Beside beside = {seen[i + 1], i ? seen[i - 1] : 0, w->stage + (i + 1) % 2};
    if (s) {
      if (any((s->from[0] > from) | (s->to[0] < behind)) || any((s->from[1] > from) | (s->to[1] < behind)))
        hide(at, s, first);
      raise_maxima(at, s, 0, scale);
      raise_maxima(at, s, 1, scale);
    }
#pragma GCC unroll 8
    for (int j = 0; j < WEIGHED; j++) {
#pragma GCC unroll 8
      for (int k = STEPS * j / WEIGHED; k < STEPS * (j + 1) / WEIGHED; k++) step_beside(w, &beside, k);
      if (s) weigh(at, s, j % 2, j / 2, scale);
    }
  }
}

/* A strip's queries, rotated by minus the span's base. */
static void turn(const Step *step, int64_t angle, Strip *s) {
  if (angle == s->angle) return;
  s->angle = angle;
  const float *cosine = step->cosine + angle * step->half, *sine = step->sine + angle * step->half;
  const int64_t pair = step->interleaved ? 1 : step->half, next = step->interleaved ? 2 : 1;
  for (int half = 0; half < 2; half++) {
    vec turned[PADDED];
    for (int i = 0; i < PADDED; i++) turned[i] = s->asked[i][half];
    for (int64_t i = 0; angle >= 0 && i < step->half; i++) {
      vec *a = turned + step->turned + i * next, *b = a + pair;
      const vec x = *a, y = *b;
      *a = x * cosine[i] - y * sine[i];
      *b = y * cosine[i] + x * sine[i];
    }
    for (int i = 0; i < PADDED; i += 2) s->query[i / DEPTH][half].pair[i % DEPTH / 2] = paired(turned[i], turned[i + 1]);
  }
}

/* Rows [from, ...) of a block of `count` in all heads of the group, which have seen nothing yet. */
static void begin(const Step *step, const Layer *l, Strip *s, int64_t kv_head, int64_t block_first, int from, int count) {
  const int64_t group = step->heads / step->kv_heads;
  s->angle = -2; /* none */
  memset(s->sum, 0, sizeof s->sum);
  for (int half = 0; half < 2; half++) {
    number query[SIDE][PADDED] __attribute__((aligned(64)));
    memset(query, 0, sizeof query);
    for (int i = 0; i < SIDE; i++) {
      const int at = from + half * SIDE + i;
      const int64_t row = at / group, head = kv_head * group + at % group;
      s->row[half][i] = at < count ? (int32_t)row : -1;
      s->most[half][i] = l->sinks ? l->sinks[head] * LOG2E : -INFINITE; /* a sink has a weight and no value */
      s->total[half][i] = l->sinks != 0;
      if (at < count)
        memcpy(query[i], l->query + head * l->head_stride + (block_first + row) * l->row_stride, sizeof(number) * DIM);
    }
    for (int p = 0; p < PARTS; p++) {
      bits a[SIDE];
      for (int i = 0; i < SIDE; i++) memcpy(a + i, query[i] + p * DEPTH, sizeof a[i]);
      transpose(a);
      for (int i = 0; i < SIDE; i++) {
        s->asked[p * DEPTH + 2 * i][half] = (vec)(a[i] << 16);
        s->asked[p * DEPTH + 2 * i + 1][half] = (vec)(a[i] & 0xffff0000);
      }
    }
  }
}

/* Sets a strip's queries and what they see of a call, for rows [first, end) of the block; other rows see nothing of it. */
static void ask(const Step *step, Strip *s, const Call *c, int64_t block_first, int64_t first, int64_t end) {
  turn(step, c->angle, s);
  const int32_t offset = (int32_t)(c->first - block_first);
  for (int half = 0; half < 2; half++) {
    const ints row = s->row[half], of_call = (row >= (int32_t)(first - block_first)) & (row < (int32_t)(end - block_first));
    s->from[half] = (ints){0};
    s->to[half] = (c->causal ? row - offset + 1 : (ints){0} + (int32_t)c->tokens) & of_call;
    for (int i = 0; c->hidden && i < SIDE; i++)
      if (of_call[i]) s->from[half][i] = (int32_t)c->hidden[row[i] - offset];
  }
}

/* The rows of a block that a call has, over its tokens. */
static void over_span(const Step *step, const Layer *l, Work *w, const Call *c, int64_t kv_head, int64_t block_first,
                      int64_t block_end) {
  const int64_t group = step->heads / step->kv_heads, offset = l->layer * c->layer + kv_head * c->head;
  const int64_t first = c->first > block_first ? c->first : block_first, end = c->end < block_end ? c->end : block_end;
  const int strips = (int)((first - block_first) * group / STRIP);
  const int strips_end = (int)(((end - block_first) * group + STRIP - 1) / STRIP);
  for (int i = strips; i < strips_end; i++) ask(step, w->strip + i, c, block_first, first, end);
  int64_t least = c->hidden ? c->tokens : 0;
  for (int64_t row = first; c->hidden && row < end; row++)
    least = c->hidden[row - c->first] < least ? c->hidden[row - c->first] : least;
  const int64_t most = c->causal ? end - c->first : c->tokens;
  for (int64_t t = least / KEYS * KEYS; t < most; t += KEYS) {
    const int tokens = c->tokens - t < KEYS ? (int)(c->tokens - t) : KEYS;
    pack(w, c, c->keys + offset, c->values + offset, t, tokens);
    over_tile(w, strips, strips_end, t, tokens, l->scale * LOG2E);
  }
}

/* A strip's results to where they belong. */
static void finish(const Step *step, const Layer *l, const Strip *s, int64_t kv_head, int64_t block_first, int from,
                   int count) {
  const int64_t group = step->heads / step->kv_heads;
  for (int half = 0; half < 2; half++)
    for (int p = 0; p < 2 * PARTS && p * SIDE < DIM; p++) {
      bits a[SIDE];
      for (int i = 0; i < SIDE; i++) a[i] = (bits)(s->sum[p][half].row[i] / s->total[half]);
      transpose(a);
      for (int i = 0; i < SIDE; i++) {
        const int at = from + half * SIDE + i, left = DIM - p * SIDE;
        if (at >= count) break;
        const int64_t row = block_first + at / group, head = kv_head * group + at % group;
        memcpy(l->out + (row * step->heads + head) * DIM + p * SIDE, a + i, sizeof(float) * (left < SIDE ? left : SIDE));
      }
    }
}

static void task(const Step *step, const Layer *l, Work *w, int64_t kv_head, const Block *block) {
  const int count = (int)((block->end - block->first) * (step->heads / step->kv_heads));
  const int strips = (count + STRIP - 1) / STRIP;
  for (int i = 0; i < strips; i++) begin(step, l, w->strip + i, kv_head, block->first, i * STRIP, count);
  for (int64_t i = block->calls; i < block->calls_end; i++)
    over_span(step, l, w, step->call + step->order[i], kv_head, block->first, block->end);
  for (int i = 0; i < strips; i++) finish(step, l, w->strip + i, kv_head, block->first, i * STRIP, count);
}

void attend_blocks(const Step *step, const Layer *l) {
  const int64_t tasks = step->blocks * step->kv_heads;
#pragma omp parallel num_threads(step->threads)
  {
    Work w;
    tiles_begin();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++) /* head by head, so that its keys stay in the cache; the last rows see most */
      task(step, l, &w, i / step->blocks, step->block + (step->blocks - 1 - i % step->blocks));
    tiles_end();
  }
}
