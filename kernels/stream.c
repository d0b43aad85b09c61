/* Span attention of single rows on the CPU: keys and values are read once, at the speed of memory.
 *
 * A span is cut into sections of at most SECTION tokens; many short spans of one chunk are together in sections that list
 * their slots. A task is one section of one key head: all scores of the section, their exponentials, then the weighted sum
 * of its values, so memory is read in two straight streams. A task leaves a partial (weighted values, maximum, sum) for
 * each query that reads the section; at the end each row merges its own, as in Flash-Decoding (Dao et al., 2023). The
 * result does not depend on the number of threads.
 *
 * stream.py compiles this file for the machine it runs on and the shape of the model: DIM is the head's dimension,
 * BFLOAT16 and HALF_KV are 0 or 1. It is written in GCC's vector extension and needs GCC 12 or newer and
 * OpenMP.
 */
#include "vectors.h"

#ifdef __AVX512F__
#define ACCUMULATORS 16 /* of 32 registers */
#else
#define ACCUMULATORS 12 /* of 16 registers */
#endif
#define TILE 4                   /* most queries that go over a section together */
#define SLOT (DIM + 2)           /* floats of a partial: values, maximum (base 2), sum */
#define AHEAD (3072 / (DIM * (int)sizeof(kept)) + 1) /* tokens between what is asked for and what is used */

/* A row of the table that stream.py: StreamRows fills. Addresses are of layer 0 and key head 0; distances count numbers. */
typedef struct {
  const kept *keys, *values;
  int64_t layer, head, token; /* distances */
  int64_t tokens;         /* 1 to SECTION */
  int64_t first, readers; /* partials [first, first + readers) are its */
  const int32_t *slots;   /* [tokens] the token that stands at each place of the section; null: 0, 1, 2... */
} Section;

/* stream.py: _Step. */
typedef struct {
  int64_t heads, kv_heads, half, interleaved, turned, threads, rows, sections; /* turned: first dimension that turns */
  const Section *section;
  const int64_t *source;      /* [partials] row whose query it is */
  const int64_t *angle;       /* [partials] index into cosine and sine; -1: not rotated */
  const float *cosine, *sine; /* [angles, half] */
  const int64_t *begin;       /* [rows + 1] where each row's partials begin in order */
  const int64_t *order;       /* [partials] */
  float *work;                /* [partials, heads, SLOT] */
} Step;

/* Ask for a head's numbers before they are needed. */
INLINE void fetch(const kept *p) {
#pragma GCC unroll 32
  for (int i = 0; i < DIM * (int)sizeof(kept); i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

#define FOLD(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

/* The sum over lanes of each of LANES vectors, as one vector. Halves are added in four rounds, or three. */
#if LANES == 8
INLINE vec sums(vec *a) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = FOLD(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + FOLD(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    a[i] = FOLD(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + FOLD(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  return FOLD(a[0], a[1], 0, 8, 2, 10, 4, 12, 6, 14) + FOLD(a[0], a[1], 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
INLINE vec sums(vec *a) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = FOLD(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           FOLD(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = FOLD(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           FOLD(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    a[i] = FOLD(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           FOLD(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return FOLD(a[0], a[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         FOLD(a[0], a[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#endif

/* Token i of a section that has `slots`, or none: `listed` is a constant, so that sections without pay nothing. */
INLINE int64_t token_at(const int listed, const int32_t *slots, int i) { return listed ? slots[i] : i; }

/* Scores of LANES / rows tokens from `slot` on for `rows` queries, [token, row]. Tokens behind `last` repeat it. */
INLINE vec products(const int rows, const int listed, const kept *keys, int64_t stride, const int32_t *slots,
                    int slot, int last, const kept *soon, const float *query) {
  vec sum[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES / rows; j++) {
    const kept *key = keys + stride * token_at(listed, slots, slot + (j < last ? j : last));
    fetch(soon + stride * j);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sum[j * rows + r] = kept_part(key, 0) * load(query + r * PARTS * LANES);
#pragma GCC unroll 32
    for (int i = 1; i < PARTS; i++)
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[j * rows + r] += kept_part(key, i) * load(query + (r * PARTS + i) * LANES);
  }
  return sums(sum);
}

/* Parts [from, from + width) of the values, weighted by `scores [tokens, rows]`. */
INLINE void weighted(const int rows, const int listed, const int from, const int width, const kept *values,
                     int64_t stride, const int32_t *slots, int tokens, const float *scores, float *const *out) {
  vec sum[ACCUMULATORS] = {{0}};
  for (int j = 0; j < tokens; j++) {
    fetch(values + stride * (token_at(listed, slots, j) + AHEAD));
#pragma GCC unroll 16
    for (int i = 0; i < width; i++) {
      vec v = kept_part(values + stride * token_at(listed, slots, j), from + i);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r * width + i] += v * scores[j * rows + r];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
    for (int i = 0; i < width; i++) {
      const int left = DIM - (from + i) * LANES;
      memcpy(out[r] + (from + i) * LANES, &sum[r * width + i], sizeof(float) * (left < LANES ? left : LANES));
    }
}

/* Soft-capping; apart, so that layers without it keep their registers. */
static __attribute__((noinline)) void capped(float *scores, int n, float cap) {
  for (int i = 0; i < n; i++) scores[i] = cap * tanhf(scores[i] / cap);
}

/* `rows` queries (a constant: 1, 2 or 4) over one section. `query [rows, PARTS * LANES]`; `out[r]` is a SLOT. */
INLINE void tile(const int rows, const int listed, const kept *keys, const kept *values, int64_t stride,
                 const int32_t *slots, int tokens, const float *query, float cap, float *const *out) {
  const int step = LANES / rows; /* tokens whose scores fill a vector */
  const int padded = (tokens + step - 1) / step * step;
  float scores[(SECTION + LANES) * TILE] __attribute__((aligned(64))); /* [padded, rows] */
  for (int slot = 0; slot < padded; slot += step) {
    const int ahead = slot + AHEAD;
    const int64_t first = token_at(listed, slots, 0), there = token_at(listed, slots, slot) + AHEAD;
    const kept *soon = ahead < tokens ? keys + stride * there : values + stride * (first + ahead - tokens);
    vec s = slot + step <= tokens
                ? products(rows, listed, keys, stride, slots, slot, step, soon, query)
                : products(rows, listed, keys, stride, slots, slot, tokens - slot - 1, soon, query);
    memcpy(scores + slot * rows, &s, sizeof s);
  }
  if (cap > 0) capped(scores, tokens * rows, cap);
  for (int i = tokens * rows; i < padded * rows; i++) scores[i] = -INFINITE;

  vec most = (vec){0} - INFINITE, total = {0};
  for (int i = 0; i < padded * rows; i += LANES) most = larger(most, load(scores + i));
  for (int i = 0; i < LANES; i++)
    for (int j = i % rows; j < LANES; j += rows)
      if (most[j] > most[i]) most[i] = most[j];
  for (int i = 0; i < padded * rows; i += LANES) {
    vec p = power(load(scores + i) - most);
    memcpy(scores + i, &p, sizeof p);
    total += p;
  }
  for (int r = 0; r < rows; r++) {
    out[r][DIM] = most[r];
    out[r][DIM + 1] = 0;
    for (int i = r; i < LANES; i += rows) out[r][DIM + 1] += total[i];
  }

#pragma GCC unroll 32
  for (int from = 0; from < PARTS; from += ACCUMULATORS / rows)
    weighted(rows, listed, from, PARTS - from < ACCUMULATORS / rows ? PARTS - from : ACCUMULATORS / rows, values,
             stride, slots, tokens, scores, out);
}

#define TILE_OF(rows)                                                                                             \
  static void tile##rows(const kept *k, const kept *v,     int64_t stride, const int32_t *slots, int n,           \
                         const float *q, float cap, float *const *out) {                                          \
    if (slots)                                                                                                    \
      tile(rows, 1, k, v, stride, slots, n, q, cap, out);                                                         \
    else                                                                                                          \
      tile(rows, 0, k, v, stride, slots, n, q, cap, out);                                                         \
  }
TILE_OF(1)
TILE_OF(2)
TILE_OF(4)

/* A query, scaled and rotated by minus the span's base, to fp32 with zeros behind its last number. */
static void rotated(const Step *step, const number *from, int64_t partial, float scale, float *to) {
  for (int i = 0; i < PARTS; i++) {
    vec x = part(from, i) * scale;
    memcpy(to + i * LANES, &x, sizeof x);
  }
  if (step->angle[partial] < 0) return;
  const float *cosine = step->cosine + step->angle[partial] * step->half;
  const float *sine = step->sine + step->angle[partial] * step->half;
  to += step->turned;
  for (int i = 0; i < step->half; i++) {
    float *a = to + (step->interleaved ? 2 * i : i), *b = a + (step->interleaved ? 1 : step->half);
    float x = *a, y = *b;
    *a = x * cosine[i] - y * sine[i];
    *b = y * cosine[i] + x * sine[i];
  }
}

/* One section of one key head: all its readers' heads of that group, tile by tile. */
static void task(const Step *step, const Section *section, int64_t layer, int64_t kv_head, const number *query,
                 int64_t head_stride, int64_t row_stride, float scale, float cap) {
  const int64_t offset = layer * section->layer + kv_head * section->head;
  const kept *keys = section->keys + offset, *values = section->values + offset;
  const int64_t group = step->heads / step->kv_heads, queries = section->readers * group;
  for (int64_t done = 0; done < queries;) {
    const int64_t left = queries - done, rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    float block[TILE * PARTS * LANES] __attribute__((aligned(64))), *out[TILE];
    for (int r = 0; r < rows; r++) {
      const int64_t partial = section->first + (done + r) / group, head = kv_head * group + (done + r) % group;
      const number *from = query + head * head_stride + step->source[partial] * row_stride;
      rotated(step, from, partial, scale, block + r * PARTS * LANES);
      out[r] = step->work + (partial * step->heads + head) * SLOT;
    }
    (rows == 4 ? tile4 : rows == 2 ? tile2 : tile1)(keys, values, section->token, section->slots, section->tokens,
                                                    block, cap, out);
    done += rows;
  }
}

/* One head of one row from its partials: weights 2^(maximum - largest maximum). A sink joins the sum once. */
static void merge(const Step *step, int64_t row, int64_t head, const float *sinks, float *out) {
  const int64_t *from = step->order + step->begin[row], *end = step->order + step->begin[row + 1];
  float most = -INFINITE, total = 0;
  for (const int64_t *p = from; p < end; p++) {
    const float *slot = step->work + (*p * step->heads + head) * SLOT;
    if (slot[DIM] > most) most = slot[DIM];
  }
  if (sinks) {
    const float sink = sinks[head] * LOG2E;
    if (sink > most) most = sink;
    total = power((vec){0} + (sink - most))[0];
  }
  for (int i = 0; i < DIM; i++) out[i] = 0;
  for (const int64_t *p = from; p < end; p++) {
    const float *slot = step->work + (*p * step->heads + head) * SLOT;
    const float weight = power((vec){0} + (slot[DIM] - most))[0];
    total += weight * slot[DIM + 1];
    for (int i = 0; i < DIM; i++) out[i] += weight * slot[i];
  }
  for (int i = 0; i < DIM; i++) out[i] /= total;
}

/* One layer of a step. `query` has numbers at [head * head_stride + row * row_stride + i]; `out [rows, heads, DIM]`.
 * `softcap` is 0 without one, `sinks [heads]` is null without them. All threads of a team call it and share the work; they
 * do not wait for each other at the end. */
static void attend_together(const Step *step, int64_t layer, const number *query, int64_t head_stride,
                            int64_t row_stride, float scale, float softcap, const float *sinks, float *out) {
  const int64_t tasks = step->sections * step->kv_heads, merges = step->rows * step->heads;
#pragma omp for schedule(dynamic)
  for (int64_t i = 0; i < tasks; i++)
    task(step, step->section + i / step->kv_heads, layer, i % step->kv_heads, query, head_stride, row_stride,
         scale * LOG2E, softcap * LOG2E);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < merges; i++)
    merge(step, i / step->heads, i % step->heads, sinks, out + i * DIM);
}

/* The same, by a team of its own. */
void attend(const Step *step, int64_t layer, const number *query, int64_t head_stride, int64_t row_stride, float scale,
            float softcap, const float *sinks, float *out) {
#pragma omp parallel num_threads(step->threads)
  attend_together(step, layer, query, head_stride, row_stride, scale, softcap, sinks, out);
}
