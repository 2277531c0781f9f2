/* RMS normalisation of rows, alone or after adding to a residual; and layer normalisation, which subtracts the mean. */
#include "../parts.h"

/* Mean of `M` elements, in float lanes that are summed at the end. */
INLINE float mean(const void *row, int64_t M, int dtype) {
  f32x16 sums = splat(0);
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) sums += load16(row, i, dtype);
  float total = sum16(sums);
  for (; i < M; i++) total += load1(row, i, dtype);
  return total / M;
}

/* Mean square of `M` elements, less `shift` if `is_centered`, a compile-time constant. */
INLINE float mean_square(const void *row, int64_t M, float shift, int is_centered, int dtype) {
  f32x16 sums = splat(0);
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) {
    f32x16 x = load16(row, i, dtype);
    if (is_centered) x = x - shift;
    sums += x * x;
  }
  float total = sum16(sums);
  for (; i < M; i++) {
    float x = load1(row, i, dtype);
    if (is_centered) x = x - shift;
    total += x * x;
  }
  return total / M;
}

/* `has_offset` is a compile-time constant: without an offset nothing is added. */
INLINE void scale(const void *row, const void *weight, void *out, int64_t M, float factor, float offset, int has_offset,
                  int dtype) {
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) {
    f32x16 w = load16(weight, i, dtype);
    if (has_offset) w = w + offset;
    store16(out, i, load16(row, i, dtype) * factor * w, dtype);
  }
  for (; i < M; i++) {
    const float w = load1(weight, i, dtype);
    store1(out, i, load1(row, i, dtype) * factor * (has_offset ? w + offset : w), dtype);
  }
}

/* Scale the differences from the mean to unit variance, then by the weight. */
INLINE void normalise_layer(const void *row, const void *weight, void *out, int64_t M, float eps, int dtype) {
  const float shift = mean(row, M, dtype);
  const float factor = 1.0f / sqrtf(mean_square(row, M, shift, 1, dtype) + eps);
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES)
    store16(out, i, (load16(row, i, dtype) - shift) * factor * load16(weight, i, dtype), dtype);
  for (; i < M; i++) store1(out, i, (load1(row, i, dtype) - shift) * factor * load1(weight, i, dtype), dtype);
}

INLINE void normalise(const void *row, const void *weight, void *out, int64_t M, float eps, float offset, int dtype) {
  const float factor = 1.0f / sqrtf(mean_square(row, M, 0, 0, dtype) + eps);
  if (offset != 0)
    scale(row, weight, out, M, factor, offset, 1, dtype);
  else
    scale(row, weight, out, M, factor, 0, 0, dtype);
}

/* Add the norm of x to the residual: the norm is rounded as if it had been stored. */
INLINE void add_normed(const void *x, const void *weight, void *residual, int64_t M, float eps, float offset,
                       int dtype) {
  const float factor = 1.0f / sqrtf(mean_square(x, M, 0, 0, dtype) + eps);
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) {
    const f32x16 normed = rounded16(load16(x, i, dtype) * factor * (load16(weight, i, dtype) + offset), dtype);
    store16(residual, i, load16(residual, i, dtype) + normed, dtype);
  }
  for (; i < M; i++) {
    const float normed = rounded(load1(x, i, dtype) * factor * (load1(weight, i, dtype) + offset), dtype);
    store1(residual, i, load1(residual, i, dtype) + normed, dtype);
  }
}

INLINE void add(const void *x, void *residual, int64_t M, int dtype) {
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) store16(residual, i, load16(residual, i, dtype) + load16(x, i, dtype), dtype);
  for (; i < M; i++) store1(residual, i, load1(residual, i, dtype) + load1(x, i, dtype), dtype);
}

void rms_norm_row(int dtype, const void *x, const void *weight, void *out, int64_t M, float eps, float offset) {
  if (dtype == BFLOAT16)
    normalise(x, weight, out, M, eps, offset, BFLOAT16);
  else
    normalise(x, weight, out, M, eps, offset, FLOAT32);
}

void layer_norm_row(int dtype, const void *x, const void *weight, void *out, int64_t M, float eps) {
  if (dtype == BFLOAT16)
    normalise_layer(x, weight, out, M, eps, BFLOAT16);
  else
    normalise_layer(x, weight, out, M, eps, FLOAT32);
}

void add_normed_row(int dtype, const void *x, const void *weight, void *residual, int64_t M, float eps, float offset) {
  if (dtype == BFLOAT16)
    add_normed(x, weight, residual, M, eps, offset, BFLOAT16);
  else
    add_normed(x, weight, residual, M, eps, offset, FLOAT32);
}

INLINE void rows(int dtype, const char *x, int64_t x_stride, char *residual, int64_t residual_stride,
                 const void *weight, const void *added_weight, char *out, int64_t out_stride, int64_t T, int64_t M,
                 float eps, float offset, int is_centered) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
#pragma omp parallel for if (T * M >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++) {
    const char *row = x + t * x_stride * size;
    if (residual) {
      char *total = residual + t * residual_stride * size;
      if (added_weight)
        add_normed(row, added_weight, total, M, eps, offset, dtype);
      else
        add(row, total, M, dtype);
      row = total;
    }
    if (!weight) continue;
    if (is_centered)
      normalise_layer(row, weight, out + t * out_stride * size, M, eps, dtype);
    else
      normalise(row, weight, out + t * out_stride * size, M, eps, offset, dtype);
  }
}

/* x, residual, out: [T, M], strides in elements between rows; weight, added_weight: [M]. If residual is null, x is
   normalised. Otherwise residual becomes residual + x, or residual + norm(x) if added_weight is not null, and the sum,
   as stored, is normalised, unless weight is null. offset is added to weights. is_centered: the mean is subtracted
   first; offset is then 0, and added_weight null. out may be x. */
EXPORT void sluice_rms_norm(int dtype, const void *x, int64_t x_stride, void *residual, int64_t residual_stride,
                            const void *weight, const void *added_weight, void *out, int64_t out_stride, int64_t T,
                            int64_t M, float eps, float offset, int is_centered) {
  if (dtype == BFLOAT16)
    rows(BFLOAT16, x, x_stride, residual, residual_stride, weight, added_weight, out, out_stride, T, M, eps, offset,
         is_centered);
  else
    rows(FLOAT32, x, x_stride, residual, residual_stride, weight, added_weight, out, out_stride, T, M, eps, offset,
         is_centered);
}
