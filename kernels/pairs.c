/* How long the processor takes for products of pairs of bf16 numbers, beside those of fp32 numbers. pairs.py compiles this
 * file where both are in the instruction set (AVX-512 BF16).
 */
#include <immintrin.h>
#include <stdint.h>
#include <time.h>

#define SUMS 16 /* more than the products that the processor has under way at a time */
#define ROUNDS 2000
#define TRIES 15

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* A sum that the compiler must compute. */
#define KEEP(sum) __asm__ volatile("" : "+v"(sum))

/* Defines a function that returns the nanoseconds of ROUNDS times SUMS products of x by itself, each added to `sum`. */
#define TIMED(name, numbers, product)                             \
  static int64_t name(numbers x) {                                \
    __m512 sums[SUMS];                                            \
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps(); \
    const int64_t began = now();                                  \
    for (int round = 0; round < ROUNDS; round++)                  \
      _Pragma("GCC unroll 16") for (int i = 0; i < SUMS; i++) {   \
        __m512 sum = sums[i];                                     \
        sums[i] = product;                                        \
        KEEP(sums[i]);                                            \
      }                                                           \
    return now() - began;                                         \
  }

TIMED(time_pairs, __m512i, _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x))
TIMED(time_singles, __m512, _mm512_fmadd_ps(x, x, sum))

/* The time of an instruction for pairs, which does the work of two, over that of one for fp32 numbers: the least times of
 * several tries in turns, because whatever else runs only adds to them. */
double pairs_over_singles(void) {
  int64_t pairs = INT64_MAX, singles = INT64_MAX;
  for (int i = 0; i < TRIES; i++) {
    const int64_t a = time_pairs(_mm512_setzero_si512()), b = time_singles(_mm512_setzero_ps());
    pairs = a < pairs ? a : pairs;
    singles = b < singles ? b : singles;
  }
  return (double)pairs / (double)(singles > 0 ? singles : 1);
}
