/* Vectors of fp32 numbers, and heads of a key or query as vectors. For files that are compiled with DIM, the dimension of a
 * head; BFLOAT16, 0 or 1: the dtype of the model (`number`); and HALF_KV, 1 where keys and values are kept in fp16, else 0
 * (`kept`). In GCC's vector extension (GCC 12 or newer).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8 /* AVX2 and NEON: wider vectors would be two or four registers each, and sums would not fit */
#endif
#define PARTS ((DIM + LANES - 1) / LANES)
#define LOG2E 1.44269504f
#define INFINITE __builtin_inff()
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

#if BFLOAT16
typedef uint16_t number;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
INLINE vec widen(halves x) { return (vec)(__builtin_convertvector(x, bits) << 16); }
#else
typedef float number;
typedef vec halves;
INLINE vec widen(vec x) { return x; }
#endif

/* Part i of a head's numbers; zeros behind its last. */
INLINE vec part(const number *p, int i) {
  halves x = {0};
  int left = DIM - i * LANES;
  memcpy(&x, p + i * LANES, sizeof(number) * (left < LANES ? left : LANES));
  return widen(x);
}

#if HALF_KV
/* Numbers beyond fp16 become its largest; not a number stays none. */
#define HALF_MOST 65504.0f
INLINE vec within_half(vec x) {
#if defined __AVX512F__
  return (vec)_mm512_max_ps(_mm512_set1_ps(-HALF_MOST), _mm512_min_ps(_mm512_set1_ps(HALF_MOST), (__m512)x));
#elif defined __AVX__
  return (vec)_mm256_max_ps(_mm256_set1_ps(-HALF_MOST), _mm256_min_ps(_mm256_set1_ps(HALF_MOST), (__m256)x));
#else
  for (int i = 0; i < LANES; i++) x[i] = x[i] > HALF_MOST ? HALF_MOST : x[i] < -HALF_MOST ? -HALF_MOST : x[i];
  return x;
#endif
}

typedef uint16_t kept;
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
#if defined __AVX512F__
INLINE vec wide_kept(shorts x) { return (vec)_mm512_cvtph_ps((__m256i)x); }
INLINE shorts narrow_kept(vec x) { return (shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined __F16C__
INLINE vec wide_kept(shorts x) { return (vec)_mm256_cvtph_ps((__m128i)x); }
INLINE shorts narrow_kept(vec x) { return (shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#else
typedef _Float16 fp16s __attribute__((vector_size(2 * LANES)));
INLINE vec wide_kept(shorts x) { return __builtin_convertvector((fp16s)x, vec); }
INLINE shorts narrow_kept(vec x) { return (shorts)__builtin_convertvector(x, fp16s); }
#endif

/* Part i of a key's or value's numbers; zeros behind its last. */
INLINE vec kept_part(const kept *p, int i) {
  shorts x = {0};
  int left = DIM - i * LANES;
  memcpy(&x, p + i * LANES, sizeof(kept) * (left < LANES ? left : LANES));
  return wide_kept(x);
}

/* A head's numbers to where they are kept. */
INLINE void keep_head(kept *to, const number *from) {
  for (int i = 0; i < PARTS; i++) {
    const shorts x = narrow_kept(within_half(part(from, i)));
    int left = DIM - i * LANES;
    memcpy(to + i * LANES, &x, sizeof(kept) * (left < LANES ? left : LANES));
  }
}
#else
typedef number kept;
INLINE vec kept_part(const kept *p, int i) { return part(p, i); }
INLINE void keep_head(kept *to, const number *from) { memcpy(to, from, sizeof(number) * DIM); }
#endif

INLINE vec load(const float *p) {
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

/* a where it is larger than b, else b. */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX__
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  ints m = a > b;
  return (vec)(((ints)a & m) | ((ints)b & ~m));
#endif
}

/* 2^x for x <= 0 to a relative error of 2e-7, and 0 below -126: 2^integer by the exponent's bits, the rest by its
 * Taylor series. */
INLINE vec power(vec x) {
  const float round = 0x1.8p23f;
  vec shifted = larger(x, (vec){0} - 127.0f) + round;
  vec f = larger(x, (vec){0} - 127.0f) - (shifted - round);
  vec y = 1.5403530e-4f * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  return (vec)(((ints)y + ((ints)shifted << 23)) & (x > -126.0f));
}
