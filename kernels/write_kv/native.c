/* Normalise heads, rotate queries and keys, store keys and values in the packed cache. */
#include "../parts.h"

#define MAX_D 512

/* Copy a head of D elements to floats; normalise it if it has weights, rounding as the element type does. */
INLINE void load_head(float *restrict head, const void *x, const void *weight, float eps, float offset, int D,
                      int dtype) {
  char normed[MAX_D * sizeof(float)] __attribute__((aligned(64)));
  if (weight) {
    rms_norm_row(dtype, x, weight, normed, D, eps, offset);
    x = normed;
  }
  int d = 0;
  for (; d + LANES <= D; d += LANES) *(f32x16 *)(head + d) = load16(x, d, dtype);
  for (; d < D; d++) head[d] = load1(x, d, dtype);
}

/* A head as it is stored. */
INLINE void store_head(void *out, const float *head, int D, int dtype) {
  int d = 0;
  for (; d + LANES <= D; d += LANES) store16(out, d, *(const f32x16 *)(head + d), dtype);
  for (; d < D; d++) store1(out, d, head[d], dtype);
}

/* Rotate the pairs (i, i + R / 2) of a head by the angles of its position. */
INLINE void rotate(float *head, const float *cos_sin, int R) {
  const float *cos = cos_sin, *sin = cos_sin + R / 2;
  float *first = head, *second = head + R / 2;
  int i = 0;
  for (; i + LANES <= R / 2; i += LANES) {
    const f32x16 a = *(f32x16 *)(first + i), b = *(f32x16 *)(second + i);
    const f32x16 c = *(const f32x16 *)(cos + i), s = *(const f32x16 *)(sin + i);
    *(f32x16 *)(first + i) = a * c - b * s;
    *(f32x16 *)(second + i) = b * c + a * s;
  }
  for (; i < R / 2; i++) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

/* keys of one block and head: bfloat16 [P / 16, DP / 2, 16, 2], float32 [P / 16, DP, 16]; head: D floats, padded. */
INLINE void store_key(void *keys, const float *head, int slot, int DP, int dtype) {
  if (dtype == BFLOAT16) {
    uint32_t *column = (uint32_t *)keys + (int64_t)(slot / LANES) * (DP / 2) * LANES + slot % LANES;
    uint32_t pairs[MAX_D / 2];
    store_head(pairs, head, DP, BFLOAT16);
    for (int d = 0; d < DP / 2; d++) column[d * LANES] = pairs[d];
  } else {
    float *column = (float *)keys + (int64_t)(slot / LANES) * DP * LANES + slot % LANES;
    for (int d = 0; d < DP; d++) column[d * LANES] = head[d];
  }
}

/* Write sixteen elements to every second place from `first` on, and nothing between: another thread may be writing
   there. */
INLINE void store_every_second(uint16_t *out, u16x16 x, int first) {
#if defined(__AVX512BW__)
  const u32x16 wide = __builtin_convertvector(x, u32x16);
  _mm512_mask_storeu_epi16(out, first ? 0xaaaaaaaau : 0x55555555u, (__m512i)(first ? wide << 16 : wide));
#else
  for (int lane = 0; lane < LANES; lane++) out[2 * lane + first] = x[lane];
#endif
}

/* values of one block and head: bfloat16 [P / 2, DP, 2], float32 [P, DP]. */
INLINE void store_value(void *values, const float *head, int slot, int DP, int dtype) {
  if (dtype == BFLOAT16) {
    uint16_t *row = (uint16_t *)values + (int64_t)(slot / 2) * DP * 2;
    for (int d = 0; d < DP; d += LANES) store_every_second(row + 2 * d, to_bf16x16(*(const f32x16 *)(head + d)), slot % 2);
  } else {
    memcpy((float *)values + (int64_t)slot * DP, head, sizeof(float) * DP);
  }
}

/* A head in int8: round(x / scale), with the scale of its largest magnitude over 127; `head` is rounded to bfloat16
   first. A head with a NaN or an infinity has an infinite scale and codes of 0, which is a NaN. Return the scale. */
INLINE float narrow_head(int8_t *codes, const float *head, int DP) {
  f32x16 largest = splat(0), wrong = splat(0);
  for (int d = 0; d < DP; d += LANES) {
    const f32x16 x = rounded16(*(const f32x16 *)(head + d), BFLOAT16);
    largest = larger16(largest, larger16(x, -x));
    wrong += x * 0.0f;
  }
  const float scale = sum16(wrong) == 0 ? greatest16(largest) / 127.0f : INFINITY;
  /* Adding 1.5 * 2^23 rounds to a whole number. */
  const f32x16 magic = splat(12582912.0f), divisor = splat(scale > 0 ? scale : 1.0f);
  for (int d = 0; d < DP; d += LANES) {
    const f32x16 x = rounded16(*(const f32x16 *)(head + d), BFLOAT16);
    const f32x16 code = scale < INFINITY ? smaller16(splat(127), larger16(splat(-127), x / divisor)) : splat(0);
    const i32x16 whole = (i32x16)(code + magic) - (i32x16)magic;
    *(i8x16 *)(codes + d) = __builtin_convertvector(whole, i8x16);
  }
  return scale;
}

/* Store a head of the cache in int8: as a key or a value in bfloat16, of codes. */
INLINE void store_narrow(const WriteKV *a, int64_t plane, const float *key, const float *value, int slot) {
  int8_t codes[MAX_D] __attribute__((aligned(64)));
  const int64_t first = plane * a->DP * a->P, at = plane * a->P + slot;
  a->key_scales[at] = narrow_head(codes, key, a->DP);
  int8_t *column = (int8_t *)a->keys + first + (slot / LANES) * a->DP * LANES + slot % LANES * 2;
  for (int d = 0; d < a->DP; d++) column[d / 2 * 2 * LANES + d % 2] = codes[d];
  a->value_scales[at] = narrow_head(codes, value, a->DP);
  int8_t *row = (int8_t *)a->values + first + (slot / 2) * a->DP * 2 + slot % 2;
  for (int d = 0; d < a->DP; d++) row[2 * d] = codes[d];
}

INLINE void write_token(const WriteKV *a, int64_t t, int dtype) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4, head_bytes = a->D * size;
  const char *row = a->qkv + t * a->qkv_stride * size;
  const float *angles = a->cos_sin + a->positions[t] * a->R;
  float head[MAX_D];
  for (int h = 0; h < a->H; h++) {
    load_head(head, row + h * head_bytes, a->query_weight, a->eps, a->offset, a->D, dtype);
    rotate(head, angles, a->R);
    char *out = a->out + (t * a->out_stride + h * a->D) * size;
    store_head(out, head, a->D, dtype);
  }
  const int64_t slot = a->slot_mapping[t];
  if (slot < 0) return;
  const int64_t block = slot / a->block_size, offset = slot % a->block_size;
  const int64_t plane_bytes = (int64_t)a->P * a->DP * size;
  float value[MAX_D];
  for (int d = a->D; d < a->DP; d++) head[d] = value[d] = 0;
  for (int g = 0; g < a->G; g++) {
    const int64_t plane = block * a->G + g;
    load_head(head, row + (a->H + g) * head_bytes, a->key_weight, a->eps, a->offset, a->D, dtype);
    rotate(head, angles, a->R);
    load_head(value, row + (a->H + a->G + g) * head_bytes, NULL, 0, 0, a->D, dtype);
    if (dtype == BFLOAT16 && a->key_scales) {
      store_narrow(a, plane, head, value, (int)offset);
    } else {
      store_key(a->keys + plane * plane_bytes, head, offset, a->DP, dtype);
      store_value(a->values + plane * plane_bytes, value, offset, a->DP, dtype);
    }
  }
}

void write_kv_tokens(const WriteKV *a, int64_t first, int64_t end, int dtype) {
  for (int64_t t = first; t < end; t++)
    if (dtype == BFLOAT16)
      write_token(a, t, BFLOAT16);
    else
      write_token(a, t, FLOAT32);
}

/* qkv: [T, (H + 2 * G) * D], qkv_stride elements between rows; positions, slot_mapping: [T]; cos_sin: [P, R];
   query_weight, key_weight: [D], or both null, to which offset is added; keys, values: the packed cache of
   kernels/paged_attention/layout.py, P slots per block and DP elements per head after padding; out: [T, H, D]; key_scales,
   value_scales: [blocks, G, P] of a cache in int8, or null. */
EXPORT void sluice_write_kv(int dtype, const void *qkv, int64_t qkv_stride, const int64_t *positions,
                            const int64_t *slot_mapping, const float *cos_sin, const void *query_weight,
                            const void *key_weight, float eps, float offset, void *keys, void *values, void *out,
                            int64_t T, int H, int G, int D, int R, int64_t block_size, int P, int DP,
                            float *key_scales, float *value_scales) {
  const WriteKV a = {qkv,  qkv_stride, positions, slot_mapping, cos_sin, query_weight, key_weight, keys, values, out,
                     (int64_t)H * D, T, block_size, H, G, D, R, P, DP, eps, offset, key_scales, value_scales};
#pragma omp parallel for if (T * (H + 2 * G) * D >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++) write_kv_tokens(&a, t, t + 1, dtype);
}
