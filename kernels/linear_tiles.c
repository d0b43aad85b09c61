/* Matrix products of blocks of rows in bf16 on a processor with a matrix unit: out = x W^T + b, in fp32, rounded at the end.
 *
 * The unit computes W x^T: 32 rows of W, as they lie in memory, are its first operand, and 32 rows of x, which are brought
 * into its order first, its second. So weights are neither packed beforehand, which would take their memory twice, nor in
 * every product. ROWS rows of x and RUN inputs at a time stay in a core's second cache, through which the weights stream,
 * while those of the next strip are fetched. Where there are more inputs than RUN, sums are carried from one run to the
 * next. Neither threads nor the rows beside a row change its results.
 *
 * linear_tiles.py compiles this file, and says what ROWS, RUN and PANEL (outputs of a task) are. decoder.c calls `pack_rows`
 * and `multiply_rows`, too, in a team of its own.
 */
#include "tiles.h"

#include <omp.h>

#define PAIR (2 * SIDE)   /* outputs, or rows, that are computed together */
#define PIECE (8 * DEPTH) /* inputs of a pair of rows that a thread packs at a time */
#define TASKS 3           /* that each thread should have: threads may differ in speed by a factor of three */

/* linear_tiles.py: _ProductStruct. `weight [outputs, inputs]`, `bias [outputs]` or null, `out [rows, outputs]`. */
typedef struct {
  const uint16_t *weight, *bias;
  uint16_t *out;
  int64_t outputs;
} Product;

/* linear_tiles.py: _CallStruct. */
typedef struct {
  const Product *product;
  int64_t products;
  const uint16_t *x; /* [rows, inputs]; inputs are a multiple of DEPTH */
  int64_t rows, inputs, threads;
  Tile *packed; /* memory for [pairs of a block's rows, inputs / DEPTH, 2] tiles */
  Tile *sums;   /* memory for [threads, PANEL / PAIR, ROWS / PAIR, 4] tiles where inputs are more than RUN */
} Call;

INLINE int64_t parts(int64_t all, int64_t each) { return (all + each - 1) / each; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Pairs of bf16 numbers, to the nearest, ties to even; what is no number stays none. */
#if EMULATED
INLINE bits nearest(vec x) {
  const bits b = (bits)x, none = (bits)(x != x);
  return ((b + 0x7fff + (b >> 16 & 1)) & ~none) | ((b | 0x400000) & none);
}
INLINE bits rounded(vec low, vec high) { return nearest(low) >> 16 | (nearest(high) & 0xffff0000); }
#else
INLINE bits rounded(vec low, vec high) {
  const shorts both = (shorts)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (bits)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10,
                                       26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif

/* Inputs [begin, end) of rows [row, row + PAIR) of x in the unit's order; zeros behind the last row. */
static void pack_pair(const uint16_t *x, int64_t rows, int64_t inputs, int64_t row, int64_t begin, int64_t end, Tile *to) {
  for (int64_t from = begin; from < end; from += DEPTH)
    for (int half = 0; half < 2; half++, to++) {
      const int64_t first = row + half * SIDE;
      bits a[SIDE];
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++) {
        a[i] = (bits){0};
        if (first + i < rows) memcpy(&a[i], x + (first + i) * inputs + from, sizeof a[i]);
      }
      transpose(a);
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++) to->pair[i] = a[i];
    }
}

/* Brings the rows of a block into the unit's order. All threads of a team call it, and wait for each other. */
void pack_rows(const uint16_t *x, int64_t rows, int64_t inputs, Tile *packed) {
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < rows; row += PAIR)
    for (int64_t from = 0; from < inputs; from += PIECE)
      pack_pair(x, rows, inputs, row, from, least(from + PIECE, inputs), packed + (row / PAIR * inputs + from) / DEPTH * 2);
}

/* Weights of PAIR outputs for a run of inputs, and what is fetched while they are multiplied. */
typedef struct {
  const uint16_t *weight;
  const char *next;      /* weights of the next strip; null: none */
  int64_t stride, apart; /* bytes from one output to the next, of both */
  int64_t deep;          /* inputs / DEPTH */
} Strip;

/* Sums of a strip's outputs and a pair of rows, [half of the outputs][half of the rows], from those at `from` (null: zero).
 * Fetches `lines` of the next strip's outputs from `line` on. */
INLINE void multiply_pair(const Strip *s, const Tile *x, int64_t line, int64_t lines, const Tile *from, Tile *to) {
  const char *weight = (const char *)s->weight, *next = s->next ? s->next + line * s->apart : 0;
  const int64_t fetched = next ? lines : 0;
  if (from) {
    tile_load(0, from);
    tile_load(1, from + 1);
    tile_load(2, from + 2);
    tile_load(3, from + 3);
  } else {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
  }
  for (int64_t d = 0; d < s->deep; d++) {
    const char *at = weight + d * sizeof(vec);
    for (int64_t i = 0; i < fetched; i++) __builtin_prefetch(next + i * s->apart + d * sizeof(vec), 0, 2);
    tile_load_rows(4, at, s->stride);
    tile_load(6, x + 2 * d);
    tile_load(7, x + 2 * d + 1);
    tile_load_rows(5, at + SIDE * s->stride, s->stride);
    tile_dot(0, 4, 6);
    tile_dot(1, 4, 7);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
  }
  tile_store(0, to);
  tile_store(1, to + 1);
  tile_store(2, to + 2);
  tile_store(3, to + 3);
}

/* Sums of a pair of outputs and a pair of rows to the rows' results. */
static void finish(const Product *p, int64_t rows, const Tile *sum, int64_t output, int64_t row) {
  const int64_t left = least(p->outputs - output, PAIR);
  float bias[PAIR] = {0};
  for (int64_t i = 0; p->bias && i < left; i++) {
    const uint32_t wide = (uint32_t)p->bias[output + i] << 16;
    memcpy(bias + i, &wide, sizeof wide);
  }
  for (int half = 0; half < 2; half++) {
    const int64_t first = row + half * SIDE;
    bits a[SIDE]; /* pairs of outputs */
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) {
      const vec *two = &sum[i / 8 * 2 + half].row[2 * i % SIDE];
      a[i] = rounded(two[0] + bias[2 * i], two[1] + bias[2 * i + 1]);
    }
    transpose(a);
    for (int64_t i = 0; i < SIDE && first + i < rows; i++) {
      uint16_t *to = p->out + (first + i) * p->outputs + output;
      if (left == PAIR)
        memcpy(to, a + i, sizeof a[i]);
      else
        memcpy(to, a + i, sizeof *to * left);
    }
  }
}

/* The strip of a task that begins at an output and an input; `copied` is memory for one that has less than PAIR outputs. */
INLINE Strip strip_of(const Product *p, int64_t inputs, int64_t output, int64_t from, int64_t run, uint16_t *copied) {
  const uint16_t *weight = p->weight + output * inputs + from;
  const int64_t stride = inputs * sizeof *weight, left = p->outputs - output;
  if (left >= PAIR) return (Strip){weight, 0, stride, stride, run / DEPTH};
  for (int64_t i = 0; i < left; i++) memcpy(copied + i * run, weight + i * inputs, sizeof *weight * run);
  memset(copied + left * run, 0, sizeof *weight * (PAIR - left) * run);
  return (Strip){copied, 0, run * sizeof *weight, stride, run / DEPTH};
}

/* Inputs that are multiplied in a row: as many in each run. */
INLINE int64_t run_of(int64_t inputs) { return parts(parts(inputs, parts(inputs, RUN)), DEPTH) * DEPTH; }

/* Outputs [output, end) of all rows. The unit's results are read one pair later than they are written: what is not yet in
 * memory when it is read costs a hundred cycles. */
static void task(const Product *p, const Tile *packed, int64_t rows, int64_t inputs, int64_t output, int64_t end,
                 Tile *sums) {
  uint16_t copied[PAIR * RUN] __attribute__((aligned(64)));
  Tile stage[2][4];
  const int64_t pairs = parts(rows, PAIR), lines = parts(PAIR, pairs), run = run_of(inputs);
  int64_t n = 0, done_output = 0, done_row = 0;
  for (int64_t from = 0; from < inputs; from += run) {
    const int64_t these = least(run, inputs - from);
    const int is_last = from + these == inputs;
    for (int64_t o = output; o < end; o += PAIR) {
      Strip s = strip_of(p, inputs, o, from, these, copied);
      if (o + PAIR >= end && !is_last)
        s.next = (const char *)(p->weight + output * inputs + from + these);
      else if (o + 2 * PAIR <= p->outputs)
        s.next = (const char *)(p->weight + (o + PAIR) * inputs + from);
      for (int64_t r = 0; r < pairs; r++, n++) {
        const Tile *x = packed + (r * inputs + from) / DEPTH * 2;
        Tile *kept = sums + ((o - output) / PAIR * pairs + r) * 4;
        multiply_pair(&s, x, r * lines, least(lines, PAIR - r * lines), from ? kept : 0, is_last ? stage[n % 2] : kept);
        if (!is_last) continue;
        if (r || o > output) finish(p, rows, stage[(n - 1) % 2], done_output, done_row);
        done_output = o;
        done_row = r * PAIR;
      }
    }
  }
  finish(p, rows, stage[(n - 1) % 2], done_output, done_row);
}

/* Outputs of a task: as many as leave every thread TASKS of them. */
INLINE int64_t panel_of(int64_t outputs, int64_t threads) {
  int64_t panel = PANEL;
  while (panel > PAIR && parts(outputs, panel) < TASKS * threads) panel /= 2;
  return panel;
}

/* out [rows, outputs] of a block of packed rows. All threads of a team call it, between `start_unit` and
 * `stop_unit`; they do not wait for each other at the end. */
void multiply_rows(const Product *p, const Tile *packed, int64_t rows, int64_t inputs, Tile *sums) {
  const int64_t panel = panel_of(p->outputs, omp_get_num_threads());
  Tile *own = sums + omp_get_thread_num() * (PANEL / PAIR) * (ROWS / PAIR) * 4;
#pragma omp for schedule(dynamic) nowait
  for (int64_t o = 0; o < p->outputs; o += panel) task(p, packed, rows, inputs, o, least(o + panel, p->outputs), own);
}

void start_unit(void) { tiles_begin(); }
void stop_unit(void) { tiles_end(); }

/* Several products of the same rows, by a team of its own. */
void multiply_blocks(const Call *c) {
  if (!c->rows) return;
  const int64_t each = parts(parts(c->rows, parts(c->rows, ROWS)), PAIR) * PAIR;
#pragma omp parallel num_threads(c->threads)
  {
    start_unit();
    for (int64_t row = 0; row < c->rows; row += each) {
      const int64_t rows = least(each, c->rows - row);
      pack_rows(c->x + row * c->inputs, rows, c->inputs, c->packed);
      for (int64_t i = 0; i < c->products; i++) {
        Product p = c->product[i];
        p.out += row * p.outputs;
        multiply_rows(&p, c->packed, rows, c->inputs, c->sums);
      }
#pragma omp barrier
    }
    stop_unit();
  }
}
