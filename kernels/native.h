/* Shared by the native CPU kernels: sixteen lanes of float, bfloat16, exponentials, tanh, and work splitting.

   Vectors are the compiler's own (gcc and clang), so the same source runs on AVX-512, AVX2 and other instruction sets;
   intrinsics appear only where an instruction has no other name. */
#ifndef SLUICE_NATIVE_H
#define SLUICE_NATIVE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define LOG2_E 1.44269504f

/* Codes of the element types, as kernels/dtypes.py numbers them. */
enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* Elements below which one thread is faster than waking the others. */
#define PARALLEL_ELEMENTS 16384

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));

/* One register of floats, or of words of four bytes. The compiler keeps wider vectors in memory, so loops that must run
   in registers use these. */
#if defined(__AVX512BW__)
#define WIDTH 16
#else
#define WIDTH 8
#endif
typedef float floats __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

typedef uint32_t any_word __attribute__((may_alias));

/* The word at an address, whatever was stored there, in every lane. */
INLINE words broadcast(const void *word) {
#if defined(__AVX512BW__)
  return (words)_mm512_set1_epi32((int32_t)*(const any_word *)word);
#elif defined(__AVX2__)
  return (words)_mm256_set1_epi32((int32_t)*(const any_word *)word);
#else
  return (words){0} + *(const any_word *)word;
#endif
}

/* The same address, which the compiler takes for another: what was read there is read again, instead of being kept in a
   register that a sum needs. */
INLINE const void *again(const void *address) {
#if defined(__GNUC__) && defined(__AVX2__) && !defined(__AVX512BW__)
  __asm__("" : "+r"(address));
#endif
  return address;
}

/* The two bfloat16 of each word. */
INLINE floats low_float(words pairs) { return (floats)(pairs << 16); }
INLINE floats high_float(words pairs) { return (floats)(pairs & 0xffff0000u); }

/* acc += x * y, in the register where it is. Left to itself, gcc copies sums from register to register, and keeps some
   of those that would fit AVX2's sixteen in memory. */
INLINE void add_product(floats *acc, floats x, floats y) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(*acc) : "x"(x), "x"(y));
#else
  *acc += x * y;
#endif
}

/* The larger of two; the second if one is a NaN. */
INLINE floats larger(floats a, floats b) {
#if defined(__AVX512BW__)
  return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  const words is_larger = (words)(a > b);
  return (floats)((is_larger & (words)a) | (~is_larger & (words)b));
#endif
}

/* x, but 0 where `from` is -inf. */
INLINE floats zero_if_hidden(floats x, floats from) {
#if defined(__AVX512BW__)
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)from, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
  return (floats)_mm512_maskz_mov_ps(seen, (__m512)x);
#else
  return (floats)((words)(from != (floats){0} - INFINITY) & (words)x);
#endif
}

/* Floats rounded to bfloat16, to nearest even; NaN is preserved. */
INLINE floats rounded_to_bf16(floats x) {
  const words bits = (words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
#if defined(__AVX512BW__)
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  return (floats)_mm512_mask_mov_epi32((__m512i)rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
#else
  const words is_nan = (words)(x != x);
  return (floats)((is_nan & 0x7fc00000u) | (~is_nan & rounded));
#endif
}

INLINE f32x16 splat(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Where a comparison holds, all bits of the lane. gcc compares vectors that are wider than the machine's one number at a
   time (118 instructions instead of a dozen), so they are compared by halves where the machine has those. */
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32), aligned(4), may_alias));
#define COMPARISON(name, operator)                                                                            \
  INLINE i32x16 name(f32x16 a, f32x16 b) {                                                                     \
    i32x16 found;                                                                                              \
    for (int i = 0; i < 2; i++) ((i32x8 *)&found)[i] = ((const f32x8 *)&a)[i] operator((const f32x8 *) & b)[i]; \
    return found;                                                                                              \
  }
#else
#define COMPARISON(name, operator) \
  INLINE i32x16 name(f32x16 a, f32x16 b) { return a operator b; }
#endif
COMPARISON(above16, >)
COMPARISON(at_least16, >=)
COMPARISON(differs16, !=)

INLINE i32x16 is_nan16(f32x16 x) { return differs16(x, x); }

INLINE f32x16 select16(i32x16 condition, f32x16 yes, f32x16 no) {
  return (f32x16)((condition & (i32x16)yes) | (~condition & (i32x16)no));
}

INLINE float from_bf16(uint16_t bits) { return as_float((uint32_t)bits << 16); }

/* Round to nearest even; NaN is preserved. */
INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = as_bits(x);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE u16x16 to_bf16x16(f32x16 x) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u32x16 is_nan = (u32x16)is_nan16(x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), u16x16);
#endif
}

/* Sixteen elements of either type, from `index` on. */
INLINE f32x16 load16(const void *x, int64_t index, int dtype) {
  if (dtype == BFLOAT16) {
    const u16x16 narrow = *(const u16x16 *)((const uint16_t *)x + index);
    return (f32x16)(__builtin_convertvector(narrow, u32x16) << 16);
  }
  return *(const f32x16 *)((const float *)x + index);
}

INLINE void store16(void *x, int64_t index, f32x16 value, int dtype) {
  if (dtype == BFLOAT16)
    *(u16x16 *)((uint16_t *)x + index) = to_bf16x16(value);
  else
    *(f32x16 *)((float *)x + index) = value;
}

INLINE float load1(const void *x, int64_t index, int dtype) {
  return dtype == BFLOAT16 ? from_bf16(((const uint16_t *)x)[index]) : ((const float *)x)[index];
}

INLINE void store1(void *x, int64_t index, float value, int dtype) {
  if (dtype == BFLOAT16)
    ((uint16_t *)x)[index] = to_bf16(value);
  else
    ((float *)x)[index] = value;
}

/* A float rounded to the element type. */
INLINE float rounded(float x, int dtype) { return dtype == BFLOAT16 ? from_bf16(to_bf16(x)) : x; }

INLINE f32x16 rounded16(f32x16 x, int dtype) {
  if (dtype != BFLOAT16) return x;
  return (f32x16)(__builtin_convertvector(to_bf16x16(x), u32x16) << 16);
}

INLINE float sum16(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
#endif
}

/* The larger and the smaller of two; the second if one is a NaN. */
INLINE f32x16 larger16(f32x16 a, f32x16 b) {
  f32x16 found;
  for (int i = 0; i < LANES / WIDTH; i++)
    ((floats *)&found)[i] = larger(((const floats *)&a)[i], ((const floats *)&b)[i]);
  return found;
}

INLINE f32x16 smaller16(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  f32x16 found;
  for (int i = 0; i < 2; i++)
    ((f32x8 *)&found)[i] = (f32x8)_mm256_min_ps((__m256)((const f32x8 *)&a)[i], (__m256)((const f32x8 *)&b)[i]);
  return found;
#else
  return select16(above16(b, a), a, b);
#endif
}

INLINE int has_nan16(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0;
#else
  const i32x16 is_nan = is_nan16(x);
  for (int i = 0; i < LANES; i++)
    if (is_nan[i]) return 1;
  return 0;
#endif
}

/* The largest of sixteen that is not a NaN. */
INLINE float greatest16(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  const __m256 half = _mm256_max_ps((__m256)((const f32x8 *)&x)[0], (__m256)((const f32x8 *)&x)[1]);
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
  float best = x[0];
  for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

/* The largest of sixteen, or NaN. */
INLINE float max16(f32x16 x) { return has_nan16(x) ? NAN : greatest16(x); }

INLINE f32x16 zero_if_hidden16(f32x16 x, f32x16 from) {
  f32x16 seen;
  for (int i = 0; i < LANES / WIDTH; i++)
    ((floats *)&seen)[i] = zero_if_hidden(((const floats *)&x)[i], ((const floats *)&from)[i]);
  return seen;
}

/* e to the x, to about one unit in the last place; at least 2^-126, at most 2^127; NaN is preserved. */
INLINE f32x16 exp16(f32x16 x) {
  const f32x16 low = splat(-87.0f), high = splat(88.0f);
  x = smaller16(high, larger16(low, x));
  /* x = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to a whole number. */
  const f32x16 magic = splat(12582912.0f);
  const f32x16 shifted = x * LOG2_E + magic;
  const f32x16 n = shifted - magic;
  f32x16 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const u32x16 power = ((u32x16)shifted - (uint32_t)0x4b400000 + 127) << 23;
  return p * (f32x16)power;
}

/* 2 to the x, to about two units in the last place, for x up to 127; at least 2^-125; NaN is preserved. */
INLINE floats exp2_floats(floats x) {
  x = larger((floats){0} - 125.0f, x);
  /* x = n + r, |r| <= 1/2; adding 1.5 * 2^23 rounds to a whole number. */
  const floats magic = (floats){0} + 12582912.0f;
  const floats shifted = x + magic;
  const floats r = x - (shifted - magic);
  floats p = (floats){0} + 1.3264727313e-3f;
  p = p * r + 9.6715129912e-3f;
  p = p * r + 5.5507335812e-2f;
  p = p * r + 2.4022242427e-1f;
  p = p * r + 6.9314700365e-1f;
  p = p * r + 1.0f;
  const words power = ((words)shifted << 23) + ((uint32_t)127 << 23);
  return p * (floats)power;
}

INLINE f32x16 exp2_16(f32x16 x) {
  f32x16 y;
  for (int i = 0; i < LANES / WIDTH; i++) ((floats *)&y)[i] = exp2_floats(((const floats *)&x)[i]);
  return y;
}

/* The hyperbolic tangent, to a relative error of 3e-7. NaN is preserved.

   (1 - e) / (1 + e), e the exponential of -2 |x|, overflows nowhere but cancels near 0. Below 0.55 an odd polynomial of
   degree 9 is used instead, fitted to a relative error of 4e-8. */
INLINE f32x16 tanh16(f32x16 x) {
  const u32x16 sign = (u32x16)x & 0x80000000u;
  const f32x16 size = (f32x16)((u32x16)x ^ sign);
  const f32x16 e = exp2_16(size * (-2.0f * LOG2_E));
  const f32x16 far = (1.0f - e) / (1.0f + e);
  const f32x16 square = x * x;
  f32x16 slope = splat(1.6437566e-2f);
  slope = slope * square - 5.2671805e-2f;
  slope = slope * square + 1.3320725e-1f;
  slope = slope * square - 3.3332947e-1f;
  return select16(above16(splat(0.55f), size), x + x * (square * slope), (f32x16)((u32x16)far | sign));
}

/* Codes of the gates: all are x times a logistic, of x or of twice the argument of gelu's tanh form; or, of gpt-oss, x
   cut above 7 times the logistic of 1.702 x, and one is added to what it gates, cut to 7 in size. */
enum { SILU = 0, GELU_TANH = 1, SWIGLU_CLAMPED = 2 };

INLINE f32x16 gate16(f32x16 x, int activation) {
  f32x16 inner = x;
  if (activation == GELU_TANH) inner = 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp16(-inner));
}

/* x cut to at most `most`; NaN is preserved. */
INLINE f32x16 cut16(f32x16 x, float most) { return select16(above16(x, splat(most)), splat(most), x); }

/* What a gate makes of its two projections. */
INLINE f32x16 gated16(f32x16 gate, f32x16 up, int activation) {
  if (activation != SWIGLU_CLAMPED) return gate16(gate, activation) * up;
  gate = cut16(gate, 7.0f);
  up = -cut16(-cut16(up, 7.0f), 7.0f);
  return gate / (1.0f + exp16(-1.702f * gate)) * (up + 1.0f);
}

#endif
