/* Matrix products of few rows on the CPU: a weight that is read serves three or four rows, or all of them from the cache.
 *
 * A task is OUTPUTS rows of the weight matrix. Each pair of an output and a row has a sum of its own, so that a row's
 * result depends neither on the rows beside it nor on the number of threads. Sums are fp32.
 *
 * linear.py compiles this file; BFLOAT16 is 0 or 1. Where the compiler may use AVX-512 BF16, pairs of bf16 numbers are
 * multiplied at once; else they are widened. It is written in GCC's vector extension (GCC 12 or newer).
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define OUTPUTS 4
#ifdef __AVX512F__
#define LANES 16
#define ROWS 4 /* 16 sums in 32 registers */
#else
#define LANES 8 /* AVX2 and NEON; wider vectors would be two or four registers each */
#define ROWS 3  /* 12 sums in 16 registers */
#endif
#define SMALL (1 << 15) /* numbers of a matrix that one thread multiplies sooner than two could be told to */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));

#if !BFLOAT16
typedef float number;
typedef vec chunk;
INLINE vec times(vec sum, chunk a, chunk b) { return sum + a * b; }
INLINE number narrow(float x) { return x; }
INLINE float wide(number x) { return x; }
#else
typedef uint16_t number;
INLINE float wide(number x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
/* To the nearest, ties to even; not a number stays none. */
INLINE number narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return (number)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#ifdef __AVX512BF16__
typedef __m512i chunk;
INLINE vec times(vec sum, chunk a, chunk b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
typedef uint16_t chunk __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
INLINE vec wide_chunk(chunk x) { return (vec)(__builtin_convertvector(x, bits) << 16); }
INLINE vec times(vec sum, chunk a, chunk b) { return sum + wide_chunk(a) * wide_chunk(b); }
#endif
#endif

#define STEP ((int)(sizeof(chunk) / sizeof(number)))

INLINE chunk whole(const number *p) {
  chunk x;
  memcpy(&x, p, sizeof x);
  return x;
}

/* The last numbers, and zeros behind them. */
INLINE chunk rest(const number *p, int64_t left) {
  number x[STEP];
  memset(x, 0, sizeof x);
  memcpy(x, p, sizeof(number) * left);
  return whole(x);
}

INLINE float sum(vec x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

/* `outputs` and `rows` are constants. */
INLINE void block(const int outputs, const int rows, const number *weights, const number *x, int64_t x_row, int64_t inputs,
                  const number *bias, number *out, int64_t out_row) {
  vec sums[OUTPUTS][ROWS];
#pragma GCC unroll 4
  for (int o = 0; o < outputs; o++)
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sums[o][r] = (vec){0};
  int64_t i = 0;
  for (; i + STEP <= inputs; i += STEP) {
    chunk w[OUTPUTS];
#pragma GCC unroll 4
    for (int o = 0; o < outputs; o++) {
      w[o] = whole(weights + o * inputs + i);
      __builtin_prefetch(weights + (OUTPUTS + o) * inputs + i, 0, 2);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      const chunk y = whole(x + r * x_row + i);
#pragma GCC unroll 4
      for (int o = 0; o < outputs; o++) sums[o][r] = times(sums[o][r], w[o], y);
    }
  }
  if (i < inputs)
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outputs; o++)
        sums[o][r] = times(sums[o][r], rest(weights + o * inputs + i, inputs - i), rest(x + r * x_row + i, inputs - i));
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int o = 0; o < outputs; o++) out[r * out_row + o] = narrow(sum(sums[o][r]) + (bias ? wide(bias[o]) : 0.0f));
}

/* Outputs [o, o + count) of all rows; `count` is a constant. */
INLINE void all_rows(const int count, int64_t o, const number *weights, const number *bias, const number *x,
                     int64_t x_row, number *out, int64_t out_row, int64_t rows, int64_t inputs) {
  const number *w = weights + o * inputs, *b = bias ? bias + o : 0;
  for (int64_t r = 0, taken; r < rows; r += taken) {
    const int64_t blocks = (rows - r + ROWS - 1) / ROWS;
    const number *from = x + r * x_row;
    number *to = out + r * out_row + o;
    taken = (rows - r + blocks - 1) / blocks; /* blocks of about one size: four rows are two and two, not three and one */
    switch (taken) {
#if ROWS == 4
      case 4: block(count, 4, w, from, x_row, inputs, b, to, out_row); break;
#endif
      case 3: block(count, 3, w, from, x_row, inputs, b, to, out_row); break;
      case 2: block(count, 2, w, from, x_row, inputs, b, to, out_row); break;
      default: block(count, 1, w, from, x_row, inputs, b, to, out_row);
    }
  }
}

/* out [rows, outputs] = x [rows, inputs] times the transpose of weights [outputs, inputs], plus bias [outputs] or null.
 * All threads of a team call it and share the work; they do not wait for each other at the end. */
static void multiply_together(const number *weights, const number *bias, const number *x, int64_t x_row, number *out,
                              int64_t out_row, int64_t rows, int64_t outputs, int64_t inputs) {
#pragma omp for schedule(static) nowait
  for (int64_t o = 0; o < outputs; o += OUTPUTS) {
    if (outputs - o >= OUTPUTS)
      all_rows(OUTPUTS, o, weights, bias, x, x_row, out, out_row, rows, inputs);
    else
      for (int64_t last = o; last < outputs; last++)
        all_rows(1, last, weights, bias, x, x_row, out, out_row, rows, inputs);
  }
}

/* The same, by a team of its own. */
void multiply(const number *weights, const number *bias, const number *x, int64_t x_row, number *out, int64_t out_row,
              int64_t rows, int64_t outputs, int64_t inputs, int64_t threads) {
#pragma omp parallel num_threads(threads) if (outputs * inputs > SMALL)
  multiply_together(weights, bias, x, x_row, out, out_row, rows, outputs, inputs);
}
