/* Attention over vLLM's paged cache for CPUs: rows of requests over their own blocks and over spans of blocks that others
 * read too.
 *
 * A block holds, for each key head, its keys transposed, [DIM, BLOCK], and then its values, [BLOCK, DIM]; they are read
 * where they lie. A task is some rows of one request and one key head. It goes over the request's parts page by page
 * with a running maximum and sum (Flash-Attention, Dao et al., 2022), so the result depends neither on the other rows of
 * the step nor on the number of threads.
 *
 * paged_spans.py compiles this file: DIM is the head's dimension and BLOCK the tokens of a block; BFLOAT16 and HALF_KV
 * are 0.
 */
#include "vectors.h"

#define MOST 128 /* queries of a task; paged_spans.py: MOST */
#define ALIGNED __attribute__((aligned(64)))

/* Rows [row, row + rows) of the step; the first has `index` in its request's sequence. Parts [first, last) are its. */
typedef struct {
  int64_t row, rows, index, first, last;
} Job;

/* Tokens [lo, hi) of the blocks from number `blocks` of the table on. `seen` is the first own token that sees them; -1:
 * they are the own tokens, and each row sees those up to itself. `angle`: index into cosine and sine; -1: not turned. */
typedef struct {
  int64_t blocks, lo, hi, seen, angle;
} Part;

/* paged_spans.py: _Plan. */
typedef struct {
  int64_t jobs, half, interleaved;
  const Job *job;
  const Part *part;
  const int32_t *block;
  const float *cosine, *sine; /* [angles, half] */
} Plan;

INLINE void store(float *p, vec x) { memcpy(p, &x, sizeof x); }

/* A query, turned and scaled. */
static void turn(const Plan *plan, int64_t angle, const float *from, float scale, float *to) {
  const int half = (int)plan->half, apart = plan->interleaved ? 1 : half, step = plan->interleaved ? 2 : 1;
  const float *cosine = plan->cosine + angle * half, *sine = plan->sine + angle * half;
  int first = 0;
  if (angle >= 0) {
    for (int i = 0; i < half; i++) {
      const float a = from[i * step], b = from[i * step + apart];
      to[i * step] = (a * cosine[i] - b * sine[i]) * scale;
      to[i * step + apart] = (b * cosine[i] + a * sine[i]) * scale;
    }
    first = 2 * half;
  }
  for (int i = first; i < DIM; i++) to[i] = from[i] * scale;
}

/* Scores [rows, BLOCK] of some queries (a constant) over a page. */
INLINE void products(const int rows, const float *keys, const float *query, float *scores) {
  for (int column = 0; column < BLOCK; column += 2 * LANES) {
    vec sum[4][2] = {{{0}}};
    for (int d = 0; d < DIM; d++) {
      const vec a = load(keys + d * BLOCK + column), b = load(keys + d * BLOCK + column + LANES);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        sum[r][0] += a * query[r * DIM + d];
        sum[r][1] += b * query[r * DIM + d];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      store(scores + r * BLOCK + column, sum[r][0]);
      store(scores + r * BLOCK + column + LANES, sum[r][1]);
    }
  }
}

/* Add parts [at, at + width) of the values of tokens [from, to) of a page, weighted. */
INLINE void weighted(const int rows, const int width, int at, int from, int to, const float *values,
                     const float *weights, float *out) {
  vec sum[4][2];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int w = 0; w < width; w++) sum[r][w] = load(out + r * DIM + (at + w) * LANES);
  for (int b = from; b < to; b++)
#pragma GCC unroll 2
    for (int w = 0; w < width; w++) {
      const vec v = load(values + b * DIM + (at + w) * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][w] += v * weights[r * BLOCK + b];
    }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int w = 0; w < width; w++) store(out + r * DIM + (at + w) * LANES, sum[r][w]);
}

INLINE void values_of(const int rows, int from, int to, const float *values, const float *weights, float *out) {
  int at = 0;
  for (; at + 2 <= PARTS; at += 2) weighted(rows, 2, at, from, to, values, weights, out);
  if (at < PARTS) weighted(rows, 1, at, from, to, values, weights, out);
}

/* Make the scores of one query over a page weights: tokens [from, to) are seen. */
static void soften(float *scores, int from, int to, float *most, float *total, float *out) {
  for (int b = 0; b < from; b++) scores[b] = -INFINITE;
  for (int b = to > from ? to : from; b < BLOCK; b++) scores[b] = -INFINITE;
  if (to <= from) {
    memset(scores, 0, sizeof(float) * BLOCK);
    return;
  }
  float highest = *most;
  for (int b = from; b < to; b++) highest = scores[b] > highest ? scores[b] : highest;
  const float factor = *most == highest ? 1.0f : exp2f(*most - highest);
  vec sum = {0};
  for (int b = 0; b < BLOCK; b += LANES) {
    const vec weight = power(load(scores + b) - highest);
    store(scores + b, weight);
    sum += weight;
  }
  float added = 0;
  for (int i = 0; i < LANES; i++) added += sum[i];
  *total = *total * factor + added;
  *most = highest;
  if (factor != 1.0f)
    for (int i = 0; i < PARTS; i++) store(out + i * LANES, load(out + i * LANES) * factor);
}

static void attend_task(const Plan *plan, const Job *job, int group, const float *query, int64_t row, const float *cache,
                        int64_t block, float scale, float *out, int64_t out_row) {
  float turned[MOST * DIM] ALIGNED, sums[MOST * DIM] ALIGNED, scores[MOST * BLOCK] ALIGNED, most[MOST], total[MOST];
  const int n = (int)job->rows * group;
  memset(sums, 0, sizeof(float) * n * DIM);
  for (int q = 0; q < n; q++) most[q] = -INFINITE, total[q] = 0;
  for (const Part *part = plan->part + job->first; part < plan->part + job->last; part++) {
    const int64_t end = job->index + job->rows;
    const int64_t hi = part->seen < 0 && end < part->hi ? end : part->hi;
    if (part->seen >= end) continue;
    for (int q = 0; q < n; q++)
      turn(plan, part->angle, query + q / group * row + q % group * DIM, scale, turned + q * DIM);
    for (int64_t page = part->lo / BLOCK; page * BLOCK < hi; page++) {
      const float *keys = cache + plan->block[part->blocks + page] * block, *values = keys + DIM * BLOCK;
      const int64_t before = part->lo - page * BLOCK, behind = hi - page * BLOCK;
      const int from = before > 0 ? (int)before : 0, to = behind < BLOCK ? (int)behind : BLOCK;
      int q = 0;
      for (; q + 4 <= n; q += 4) products(4, keys, turned + q * DIM, scores + q * BLOCK);
      for (; q < n; q++) products(1, keys, turned + q * DIM, scores + q * BLOCK);
      for (q = 0; q < n; q++) {
        const int64_t index = job->index + q / group, causal = index + 1 - page * BLOCK;
        int seen = part->seen >= 0 ? (index < part->seen ? 0 : to) : causal < to ? (int)causal : to;
        soften(scores + q * BLOCK, from, seen, most + q, total + q, sums + q * DIM);
      }
      for (q = 0; q + 4 <= n; q += 4) values_of(4, from, to, values, scores + q * BLOCK, sums + q * DIM);
      for (; q < n; q++) values_of(1, from, to, values, scores + q * BLOCK, sums + q * DIM);
    }
  }
  for (int q = 0; q < n; q++)
    for (int i = 0; i < DIM; i++) out[q / group * out_row + q % group * DIM + i] = sums[q * DIM + i] / total[q];
}

/* `query` and `out` [tokens, heads, DIM] with rows of `row` and `out_row` numbers; `cache` [blocks, kv_heads, ...] with
 * `block` and `head` numbers between two. */
void attend_pages(const Plan *plan, int64_t heads, int64_t kv_heads, const float *query, int64_t row,
                  const float *cache, int64_t block, int64_t head, float scale, float *out, int64_t out_row,
                  int64_t threads) {
  const int group = (int)(heads / kv_heads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < plan->jobs * kv_heads; task++) {
    const Job *job = plan->job + task / kv_heads;
    const int64_t kv = task % kv_heads, first = kv * group * DIM;
    attend_task(plan, job, group, query + job->row * row + first, row, cache + kv * head, block, scale * LOG2E,
                out + job->row * out_row + first, out_row);
  }
}
