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
  for (int d = a->D; d < a->DP; d++) head[d] = 0;
  for (int g = 0; g < a->G; g++) {
    const int64_t plane = (block * a->G + g) * plane_bytes;
    load_head(head, row + (a->H + g) * head_bytes, a->key_weight, a->eps, a->offset, a->D, dtype);
    rotate(head, angles, a->R);
    store_key(a->keys + plane, head, offset, a->DP, dtype);
    load_head(head, row + (a->H + a->G + g) * head_bytes, NULL, 0, 0, a->D, dtype);
    store_value(a->values + plane, head, offset, a->DP, dtype);
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
   kernels/paged_attention/layout.py, P slots per block and DP elements per head after padding; out: [T, H, D]. */
EXPORT void sluice_write_kv(int dtype, const void *qkv, int64_t qkv_stride, const int64_t *positions,
                            const int64_t *slot_mapping, const float *cos_sin, const void *query_weight,
                            const void *key_weight, float eps, float offset, void *keys, void *values, void *out,
                            int64_t T, int H, int G, int D, int R, int64_t block_size, int P, int DP) {
  const WriteKV a = {qkv,  qkv_stride, positions, slot_mapping, cos_sin, query_weight, key_weight, keys, values, out,
                     (int64_t)H * D, T, block_size, H, G, D, R, P, DP, eps, offset};
#pragma omp parallel for if (T * (H + 2 * G) * D >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++) write_kv_tokens(&a, t, t + 1, dtype);
}
