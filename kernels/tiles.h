/* Tiles of a processor's matrix unit (AMX), what brings numbers into their order, and vectors of a tile's rows. For files in
 * bf16 that multiply on it:
 *
 *     c [16, 16] fp32 += a [16, 32] bf16 . b [16, 16] pairs of bf16, pair j of column n being rows 2j and 2j + 1 of B
 *
 * A file that is compiled with -DEMULATED=1 has the same tiles in plain C, so that everything else in it can be tested on
 * any processor. In GCC's vector extension, with 16 numbers of 32 bits a vector whatever the processor's registers hold.
 */
#include <stdint.h>
#include <string.h>
#if defined __AVX512F__ || !EMULATED
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define SIDE 16 /* rows of a tile, and numbers of 32 bits in one of them */
#define DEPTH (2 * SIDE) /* bf16 numbers in a row of a tile */

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(64)));

/* A tile in memory. */
typedef union {
  uint16_t half[SIDE][DEPTH];
  float number[SIDE][SIDE];
  bits pair[SIDE];
  vec row[SIDE];
} Tile;

#if EMULATED
static __thread Tile unit[8];

INLINE float widened(uint16_t x) {
  const uint32_t b = (uint32_t)x << 16;
  float y;
  memcpy(&y, &b, sizeof y);
  return y;
}

static void emulated_dot(Tile *c, const Tile *a, const Tile *b) {
  for (int m = 0; m < SIDE; m++)
    for (int k = 0; k < SIDE; k++)
      for (int n = 0; n < SIDE; n++)
        c->number[m][n] += widened(a->half[m][2 * k]) * widened(b->half[k][2 * n]) +
                           widened(a->half[m][2 * k + 1]) * widened(b->half[k][2 * n + 1]);
}

#define tile_zero(n) memset(unit + (n), 0, sizeof(Tile))
#define tile_load(n, from) memcpy(unit + (n), from, sizeof(Tile))
#define tile_load_rows(n, from, stride) \
  do { \
    for (int i = 0; i < SIDE; i++) memcpy(&unit[n].row[i], (const char *)(from) + i * (stride), sizeof(vec)); \
  } while (0)
#define tile_store(n, to) memcpy(to, unit + (n), sizeof(Tile))
#define tile_dot(c, a, b) emulated_dot(unit + (c), unit + (a), unit + (b))
INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}
#else
#define tile_zero(n) _tile_zero(n)
/* Rows that are `stride` bytes apart. GCC's own does not say that it reads memory. */
#define tile_load_rows(n, from, stride) \
  do { \
    __asm__ volatile("" ::: "memory"); \
    _tile_loadd(n, from, stride); \
  } while (0)
#define tile_load(n, from) tile_load_rows(n, from, sizeof(vec))
#define tile_store(n, to) _tile_stored(n, to, sizeof(vec))
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)

/* Every thread has a configuration of its own, which others (torch) set anew where they need one. */
INLINE void tiles_begin(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } how __attribute__((aligned(64))) = {.palette = 1};
  for (int i = 0; i < 8; i++) how.bytes[i] = sizeof(vec), how.rows[i] = SIDE;
  __asm__ volatile("" ::"r"(&how) : "memory"); /* GCC's own does not say that it reads memory */
  _tile_loadconfig(&how);
}
INLINE void tiles_end(void) { _tile_release(); }
#endif

/* Pairs of bf16 numbers, to the nearest, ties up; of finite numbers. */
INLINE bits paired(vec low, vec high) {
  const shorts a = (shorts)((bits)low + 0x8000), b = (shorts)((bits)high + 0x8000);
  return (bits)__builtin_shufflevector(a, b, 1, 33, 3, 35, 5, 37, 7, 39, 9, 41, 11, 43, 13, 45, 15, 47, 17, 49, 19, 51, 21,
                                       53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63);
}

/* Transposes 16 x 16 numbers of 32 bits: every round moves one bit of a number's place from the column to the row. */
INLINE void transpose(bits *a) {
  bits b[SIDE];
#pragma GCC unroll 4
  for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
    for (int i = 0; i < SIDE / 2; i++) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) a[i] = b[i];
  }
}

/* a where it is larger than b, else b. */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  const ints m = a > b;
  return (vec)(((ints)a & m) | ((ints)b & ~m));
#endif
}

/* 2^x to a relative error of 1e-4, exact for whole x; 0 for minus infinity. */
INLINE vec power(vec x) {
#ifdef __AVX512DQ__
  const vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const vec bounded = larger(x, (vec){0} - 127.0f);
  vec whole = __builtin_convertvector(__builtin_convertvector(bounded, ints), vec);
  whole -= (vec)((ints)((vec){0} + 1.0f) & (whole > bounded));
  const vec f = bounded - whole;
#endif
  vec y = 0.07826797f * f + 0.22630768f;
  y = y * f + 0.69542435f;
  y = y * f + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
  return (vec)(((ints)y + (__builtin_convertvector(whole, ints) << 23)) & (x > -126.0f));
#endif
}

INLINE int any(ints m) {
#ifdef __AVX512DQ__
  return _mm512_movepi32_mask((__m512i)m) != 0;
#else
  int found = 0;
  for (int i = 0; i < SIDE; i++) found |= m[i];
  return found != 0;
#endif
}
