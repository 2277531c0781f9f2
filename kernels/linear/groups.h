/* Products with weights in groups of 32 elements of K, of 4 or 8 bits each.

   A row of x is rounded to 8 bits in groups, too. The sum of a group is an integer, and exact; the groups of a row are
   added in their order. The reference is grouped.py. */
#ifndef SLUICE_GROUPS_H
#define SLUICE_GROUPS_H

#include "panel.h"

#define GROUP 32
#define GROUP_ROWS 8 /* rows of one pass: their sums of a group stay in registers, and x has them beside each other */

/* A group of a row: x is scale * codes. */
typedef struct {
  int8_t codes[GROUP];
  float scale;
  float sum;      /* of x */
  int32_t offset; /* -128 times the sum of codes: what an 8-bit code adds that is made positive by 128 */
} XGroup;

/* x: [T / 8, K / 32, 8] groups. */
INLINE XGroup *group_of(void *x, int64_t t, int64_t g, int64_t groups) {
  return (XGroup *)x + (t / GROUP_ROWS * groups + g) * GROUP_ROWS + t % GROUP_ROWS;
}

/* A group of a panel: codes, [words, PANEL] words of four bytes, then scales [PANEL] and, of 4 bits, minimums [PANEL].
   With 4 bits a word has eight elements, the first four in the low halves of its bytes. Scales and minimums are
   float16; of UNITS4 they are bytes, and the panel's groups are followed by their units: for each 8 groups what a scale
   of one and a minimum of one stand for, [2, PANEL] float16. Groups of SPANS4 and SPANS8 are codes alone: the panel's
   groups are followed by scales [spans, PANEL] in float32, then by zeros [spans, PANEL], bytes with a sign: the codes
   that stand for zero. A panel of theirs is padded to whole lines. */
#define UNIT_GROUPS 8
#define UNIT_BYTES (2 * PANEL * 2)
#define SPAN_BYTES (PANEL * 4 + PANEL)
INLINE int has_spans(int64_t kind) { return kind == SPANS4 || kind == SPANS8; }
INLINE int has_bytes(int64_t kind) { return kind == GROUPS8 || kind == SPANS8; } /* as codes, with a sign */
INLINE int num_words(int kind) { return has_bytes(kind) ? 8 : 4; }
INLINE int code_bytes(int kind) { return num_words(kind) * PANEL * 4; }
INLINE int scale_bytes(int kind) { return kind == UNITS4 ? 1 : 2; }
INLINE int group_bytes(int kind) {
  return code_bytes(kind) + (has_spans(kind) ? 0 : (kind == GROUPS8 ? 1 : 2) * PANEL * scale_bytes(kind));
}

INLINE int64_t groups_panel_bytes(const Weight *w) {
  const int64_t groups = w->K / GROUP, codes = groups * group_bytes((int)w->kind);
  if (has_spans(w->kind)) return (codes + groups / w->span * SPAN_BYTES + 63) / 64 * 64;
  return codes + (w->kind == UNITS4 ? groups / UNIT_GROUPS * UNIT_BYTES : 0);
}

/* One register of float16, widened. */
INLINE floats load_halves(const char *from) {
#if defined(__AVX512BW__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
  /* Shifted into place, the exponent lacks 112: a product makes it up, and reads subnormal numbers as well. */
  uint16_t bits[WIDTH];
  memcpy(bits, from, sizeof bits);
  floats out;
  for (int i = 0; i < WIDTH; i++)
    out[i] = as_float((uint32_t)(bits[i] & 0x8000) << 16 | (uint32_t)(bits[i] & 0x7fff) << 13) * 0x1p112f;
  return out;
#endif
}

/* One register of bytes, as floats. */
INLINE floats load_bytes(const char *from) {
#if defined(__AVX512BW__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
  floats out;
  for (int i = 0; i < WIDTH; i++) out[i] = ((const uint8_t *)from)[i];
  return out;
#endif
}

/* One register of bytes with a sign, as floats. */
INLINE floats load_signed_bytes(const char *from) {
#if defined(__AVX512BW__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
  floats out;
  for (int i = 0; i < WIDTH; i++) out[i] = ((const int8_t *)from)[i];
  return out;
#endif
}

/* One register of scales, or of minimums, of a group; `unit`: those of its unit. */
INLINE floats load_scales(const char *scales, const char *unit, int v, int kind) {
  if (kind != UNITS4) return load_halves(scales + v * WIDTH * 2);
  return load_bytes(scales + v * WIDTH) * load_halves(unit + v * WIDTH * 2);
}

/* acc plus four products a lane, of codes without a sign below 16. Without VNNI a lane has two sums of 16 bits, which
   hold the eight additions of a group; `joined` adds them. */
INLINE ints add_nibbles(ints acc, words codes, words x) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512BW__)
  return (ints)_mm512_add_epi16((__m512i)acc, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
#elif defined(__AVX2__)
  return (ints)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
#else
  for (int i = 0; i < 4; i++) acc += (ints)(codes >> 8 * i & 255) * ((ints)(x << (24 - 8 * i)) >> 24);
  return acc;
#endif
}

/* acc, as it is now: the compiler would add in another order, for which it has too few registers. */
INLINE ints in_order(ints acc) {
#if defined(__AVX2__)
  __asm__("" : "+v"(acc));
#endif
  return acc;
}

INLINE ints joined(ints acc) {
#if defined(__AVX512VNNI__)
  return acc;
#elif defined(__AVX512BW__)
  return (ints)_mm512_madd_epi16((__m512i)acc, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return (ints)_mm256_madd_epi16((__m256i)acc, _mm256_set1_epi16(1));
#else
  return acc;
#endif
}

/* acc plus four products a lane, of codes with a sign. One operand of these instructions has none: VNNI takes the codes
   plus 128, and the sum begins with what that adds; the others take the codes' sizes, and their signs go to x. */
INLINE ints add_bytes(ints acc, words codes, words x) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)(codes ^ 0x80808080u), (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i minus = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(),
                                             (__m512i)x);
  return acc + joined((ints)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), minus));
#elif defined(__AVX2__)
  const __m256i signed_x = _mm256_sign_epi8((__m256i)x, (__m256i)codes);
  return acc + joined((ints)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), signed_x));
#else
  for (int i = 0; i < 4; i++) acc += ((ints)(codes << (24 - 8 * i)) >> 24) * ((ints)(x << (24 - 8 * i)) >> 24);
  return acc;
#endif
}

INLINE ints before_bytes(const XGroup *x) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_set1_epi32(x->offset);
#else
  (void)x;
  return (ints){0};
#endif
}

/* Integer sums of `num_rows` rows by one register of columns of a group. */
INLINE void sum_group(ints *sums, int num_rows, const XGroup *x, const char *codes, int kind) {
  for (int r = 0; r < num_rows; r++) sums[r] = has_bytes(kind) ? before_bytes(x + r) : (ints){0};
  for (int u = 0; u < num_words(kind); u++) {
    const words w = *(const words *)(codes + u * PANEL * 4);
    if (has_bytes(kind)) {
      for (int r = 0; r < num_rows; r++) sums[r] = in_order(add_bytes(sums[r], w, broadcast(x[r].codes + u * 4)));
      continue;
    }
    const words low = w & 0x0f0f0f0fu, high = w >> 4 & 0x0f0f0f0fu;
    for (int r = 0; r < num_rows; r++) sums[r] = in_order(add_nibbles(sums[r], low, broadcast(x[r].codes + u * 8)));
    for (int r = 0; r < num_rows; r++)
      sums[r] = in_order(add_nibbles(sums[r], high, broadcast(x[r].codes + u * 8 + 4)));
  }
  if (!has_bytes(kind))
    for (int r = 0; r < num_rows; r++) sums[r] = joined(sums[r]);
}

/* The same address, about which the compiler knows nothing: it would read the words of all rows once for all columns,
   and keep them on the stack, as vectors. */
INLINE const XGroup *unknown(const XGroup *address) {
  __asm__("" : "+r"(address));
  return address;
}

/* The scales of a register of columns of a group, and what a code of 0 stands for. */
typedef struct {
  floats scale, minimum;
} Steps;

/* `scales`: of the group; `shared`: its unit, or its span's scales; `zeros`: those of its span. */
INLINE Steps load_steps(const char *scales, const char *shared, const char *zeros, int v, int kind) {
  if (has_spans(kind)) {
    const floats scale = *(const floats *)(shared + v * WIDTH * 4);
    return (Steps){scale, -(load_signed_bytes(zeros + v * WIDTH) * scale)};
  }
  const floats scale = load_scales(scales, shared, v, kind);
  if (kind == GROUPS8) return (Steps){scale, (floats){0}};
  return (Steps){scale, load_scales(scales + PANEL * scale_bytes(kind), shared + PANEL * 2, v, kind)};
}

/* Sums of `num_rows` rows of x by a panel, of whose groups `span` share a scale. */
INLINE void multiply_groups(Sums *sums, int num_rows, const XGroup *x, const char *panel, int64_t groups, int64_t span,
                            Fetch next, int kind) {
  const char *shared = panel + groups * group_bytes(kind); /* units, or spans */
  const char *zeros = has_spans(kind) ? shared + groups / span * PANEL * 4 : NULL;
  int64_t in_span = 0;
  for (int r = 0; r < num_rows; r++) memset(sums->f[r], 0, sizeof sums->f[r]);
  for (int64_t g = 0; g < groups; g++) {
    const char *group = panel + g * group_bytes(kind), *scales = group + code_bytes(kind);
    if (kind == UNITS4) shared = panel + groups * group_bytes(kind) + g / UNIT_GROUPS * UNIT_BYTES;
    if (has_spans(kind) && in_span++ == span) {
      shared += PANEL * 4;
      zeros += PANEL;
      in_span = 1;
    }
    const XGroup *rows = x + g * GROUP_ROWS;
    for (int v = 0; v < PANEL / WIDTH; v++) {
      ints whole[GROUP_ROWS];
      rows = unknown(rows);
      sum_group(whole, num_rows, rows, group + v * WIDTH * 4, kind);
      const Steps steps = load_steps(scales, shared, zeros, v, kind);
      for (int r = 0; r < num_rows; r++) {
        floats *sum = (floats *)(sums->f[r] + v * WIDTH);
        *sum += __builtin_convertvector(whole[r], floats) * rows[r].scale * steps.scale;
        if (kind != GROUPS8) *sum += steps.minimum * rows[r].sum;
      }
    }
    fetch_far(&next, g);
  }
}

/* Sixteen elements of a row, of an order if there is one. */
INLINE f32x16 load_ordered16(const void *row, const int32_t *order, int64_t k) {
  if (!order) return load16(row, k, BFLOAT16);
  uint16_t picked[LANES];
  for (int i = 0; i < LANES; i++) picked[i] = ((const uint16_t *)row)[order[k + i]];
  return load16(picked, 0, BFLOAT16);
}

/* A row as groups of row t: each code is round(x / scale), scale the largest of a group over 127. What is not finite
   stays so: its scale carries it into the product. */
INLINE void quantize_groups(const void *row, const int32_t *order, void *x, int64_t t, int64_t K) {
  const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  for (int64_t k = 0; k < K; k += GROUP) {
    XGroup *out = group_of(x, t, k / GROUP, K / GROUP);
    const f32x16 left = load_ordered16(row, order, k), right = load_ordered16(row, order, k + LANES);
    /* Sizes are ordered as their bits are, and those of a NaN are above infinity's. */
    const i32x16 a = (i32x16)left & 0x7fffffff, b = (i32x16)right & 0x7fffffff;
    int32_t sizes[LANES], most = 0;
    *(i32x16 *)sizes = (a & (a > b)) | (b & ~(a > b));
    for (int i = 0; i < LANES; i++) most = sizes[i] > most ? sizes[i] : most;
    const float largest = as_float((uint32_t)most);
    const float factor = largest > 0 && largest < INFINITY ? 127.0f / largest : 0;
    const i32x16 low = (i32x16)(left * factor + magic) - 0x4b400000;
    const i32x16 high = (i32x16)(right * factor + magic) - 0x4b400000;
    *(i8x16 *)out->codes = __builtin_convertvector(low, i8x16);
    *(i8x16 *)(out->codes + LANES) = __builtin_convertvector(high, i8x16);
    int32_t total = 0;
    *(i32x16 *)sizes = low + high;
    for (int i = 0; i < LANES; i++) total += sizes[i];
    out->scale = largest / 127.0f;
    out->sum = out->scale * (float)total;
    out->offset = -128 * total;
  }
}

#endif
