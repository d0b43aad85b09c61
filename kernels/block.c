/* Attention of blocks of rows in bf16 on a CPU with AVX-512 BF16: products in bf16, everything else in fp32.
 *
 * A task is a block of rows and one key head. The heads of a group that share the key head are rows of their own (row
 * by row, so that a block's rows see about the same keys). Keys come in tiles: a tile's keys and values are packed so that one
 * instruction multiplies a pair of numbers in each of 16 lanes, and then a strip of rows at a time goes over it, with
 * its scores in registers. Softmax is online, as in FlashAttention (Dao et al., 2022). The result does not depend on the
 * number of threads.
 *
 * block.py compiles this file; DIM is the head's dimension, an even number. It needs GCC 12 or newer.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define HALF (DIM / 2)                       /* pairs of numbers of a head */
#define PARTS ((DIM + LANES - 1) / LANES)    /* vectors of a head in fp32 */
#define STRIP 6                              /* rows whose scores are in registers together */
#define WIDTH 4                              /* vectors of a tile's keys, and of a head's parts, beside them */
#define TILE (WIDTH * LANES)                 /* keys */
#define BLOCK (32 * STRIP)                   /* rows of a task */
#define LOG2E 1.44269504f
#define LN2 0.69314718f
#define INLINE static inline __attribute__((always_inline))

/* block.py: _Call. Distances count numbers. */
typedef struct {
  const uint16_t *query, *keys, *values;
  float *out, *lse; /* [heads, rows, DIM], [heads, rows] */
  int64_t query_head, query_row, key_head, key_token, value_head, value_token;
  int64_t heads, kv_heads, rows, tokens, causal, threads;
  float scale;
} Call;

/* What a task keeps: a tile's packed keys and values, its queries as pairs, its rows' sums, maxima (base 2) and totals. */
typedef struct {
  uint32_t keys[HALF * TILE];                  /* [pair, key] */
  uint32_t values[TILE / 2 * PARTS * LANES];   /* [pair of keys, number] */
  uint32_t query[BLOCK * HALF];                /* [row, pair] */
  float sum[BLOCK * PARTS * LANES];            /* [row, number] */
  float most[BLOCK], total[BLOCK];
  int64_t seen[BLOCK];                         /* keys that a row sees */
} __attribute__((aligned(64))) Work;

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* 2^x for x <= 0 to a relative error of 2e-7; 0 for minus infinity. */
INLINE __m512 power(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-160.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.5403530e-4f), f, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

/* Transposes 16 x 16 numbers of 32 bits. */
INLINE void transpose(__m512i *a) {
  __m512i b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

/* The first `left` of 16 lanes. */
INLINE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : left <= 0 ? 0 : (1u << left) - 1; }

static void pack_keys(uint32_t *to, const uint16_t *keys, int64_t stride, int64_t tokens) {
  for (int t = 0; t < TILE; t += LANES)
    for (int p = 0; p < HALF; p += LANES) {
      __m512i a[16];
      for (int i = 0; i < 16; i++)
        a[i] = t + i < tokens ? _mm512_maskz_loadu_epi32(lanes(HALF - p), keys + (t + i) * stride + 2 * p)
                              : _mm512_setzero_si512();
      transpose(a);
      for (int i = 0; i < 16 && p + i < HALF; i++) _mm512_store_si512(to + (p + i) * TILE + t, a[i]);
    }
}

static void pack_values(uint32_t *to, const uint16_t *values, int64_t stride, int64_t tokens) {
  for (int t = 0; t < TILE; t += 2)
    for (int i = 0; i < PARTS; i++) {
      const uint16_t *from = values + t * stride + i * LANES;
      const __mmask16 mask = lanes(DIM - i * LANES);
      const __m256i low = _mm256_maskz_loadu_epi16(t < tokens ? mask : 0, from);
      const __m256i high = _mm256_maskz_loadu_epi16(t + 1 < tokens ? mask : 0, from + stride);
      const __m512i pair =
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      _mm512_store_si512(to + (t / 2 * PARTS + i) * LANES, pair);
    }
}

/* Parts [from, from + width) of a strip's sums, plus the tile's values weighted by `weights [row, pair of keys]`. */
INLINE void weighted(Work *w, int row, int from, const int width, const uint32_t *weights, const float *fade) {
  __m512 sum[STRIP][WIDTH];
  float *const out = w->sum + (row * PARTS + from) * LANES;
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < width; i++)
      sum[r][i] = _mm512_mul_ps(_mm512_load_ps(out + (r * PARTS + i) * LANES), _mm512_set1_ps(fade[r]));
  for (int p = 0; p < TILE / 2; p++) {
    __m512i value[WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < width; i++) value[i] = _mm512_load_si512(w->values + (p * PARTS + from + i) * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP; r++) {
      const __m512i weight = _mm512_set1_epi32((int)weights[r * TILE / 2 + p]);
#pragma GCC unroll 4
      for (int i = 0; i < width; i++) sum[r][i] = dot(sum[r][i], value[i], weight);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < width; i++) _mm512_store_ps(out + (r * PARTS + i) * LANES, sum[r][i]);
}

/* A strip's rows over a tile. `first` is the tile's first key. */
static void strip(Work *w, int row, int64_t first, float scale) {
  __m512 score[STRIP][WIDTH];
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) score[r][j] = _mm512_setzero_ps();
  const uint32_t *query = w->query + row * HALF;
  for (int p = 0; p < HALF; p++) {
    __m512i key[WIDTH];
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) key[j] = _mm512_load_si512(w->keys + p * TILE + j * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < STRIP; r++) {
      const __m512i number = _mm512_set1_epi32((int)query[r * HALF + p]);
#pragma GCC unroll 4
      for (int j = 0; j < WIDTH; j++) score[r][j] = dot(score[r][j], key[j], number);
    }
  }
  uint32_t weights[STRIP * TILE / 2] __attribute__((aligned(64)));
  float fade[STRIP];
#pragma GCC unroll 6
  for (int r = 0; r < STRIP; r++) {
    const int64_t seen = w->seen[row + r] - first;
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) {
      const __m512 x = _mm512_mul_ps(score[r][j], _mm512_set1_ps(scale));
      score[r][j] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes(seen - j * LANES), x);
      most = _mm512_max_ps(most, score[r][j]);
    }
    const float before = w->most[row + r], now = fmaxf(before, _mm512_reduce_max_ps(most));
#pragma GCC unroll 4
    for (int j = 0; j < WIDTH; j++) {
      const __m512 weight = power(_mm512_sub_ps(score[r][j], _mm512_set1_ps(now)));
      total = _mm512_add_ps(total, weight);
      _mm256_store_si256((__m256i *)(weights + (r * TILE + j * LANES) / 2), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    fade[r] = _mm512_cvtss_f32(power(_mm512_set1_ps(before - now)));
    w->most[row + r] = now;
    w->total[row + r] = w->total[row + r] * fade[r] + _mm512_reduce_add_ps(total);
  }
#pragma GCC unroll 16
  for (int from = 0; from < PARTS; from += WIDTH)
    weighted(w, row, from, PARTS - from < WIDTH ? PARTS - from : WIDTH, weights, fade);
}

/* Rows [from, from + BLOCK) of a key head, where row i is row i / group of its head i % group. */
static void task(const Call *c, Work *w, int64_t kv_head, int64_t from) {
  const int64_t group = c->heads / c->kv_heads, all = c->rows * group;
  const int count = all - from < BLOCK ? (int)(all - from) : BLOCK;
  const int padded = (count + STRIP - 1) / STRIP * STRIP;
  for (int i = 0; i < padded; i++) {
    const int64_t folded = i < count ? from + i : from + count - 1, row = folded / group;
    const int64_t head = kv_head * group + folded % group;
    memcpy(w->query + i * HALF, c->query + head * c->query_head + row * c->query_row, DIM * sizeof(uint16_t));
    w->seen[i] = c->causal ? row + 1 : c->tokens;
    w->most[i] = -INFINITY;
    w->total[i] = 0;
  }
  memset(w->sum, 0, sizeof(float) * padded * PARTS * LANES);
  for (int64_t first = 0; first < w->seen[padded - 1]; first += TILE) {
    const int64_t tokens = c->tokens - first < TILE ? c->tokens - first : TILE;
    pack_keys(w->keys, c->keys + kv_head * c->key_head + first * c->key_token, c->key_token, tokens);
    pack_values(w->values, c->values + kv_head * c->value_head + first * c->value_token, c->value_token, tokens);
    for (int row = 0; row < padded; row += STRIP)
      if (w->seen[row + STRIP - 1] > first) strip(w, row, first, c->scale * LOG2E);
  }
  for (int i = 0; i < count; i++) {
    const int64_t folded = from + i, row = folded / group, head = kv_head * group + folded % group;
    float *out = c->out + (head * c->rows + row) * DIM;
    for (int j = 0; j < DIM; j++) out[j] = w->sum[i * PARTS * LANES + j] / w->total[i];
    c->lse[head * c->rows + row] = (w->most[i] + log2f(w->total[i])) * LN2;
  }
}

void attend_blocks(const Call *c) {
  const int64_t blocks = (c->rows * (c->heads / c->kv_heads) + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(c->threads)
  {
    Work w;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < blocks * c->kv_heads; i++) /* under a causal mask the last blocks are the longest */
      task(c, &w, i % c->kv_heads, (blocks - 1 - i / c->kv_heads) * BLOCK);
  }
}
