/* activation(gate) * up, elementwise. */
#include "../native.h"

INLINE void rows(int dtype, int activation, const char *gate_up, int64_t stride, char *out, int64_t out_stride,
                 int64_t T, int64_t I) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
#pragma omp parallel for if (T * I >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++) {
    const char *gate = gate_up + t * stride * size, *up = gate + I * size;
    char *row = out + t * out_stride * size;
    int64_t i = 0;
    for (; i + LANES <= I; i += LANES)
      store16(row, i, gated16(load16(gate, i, dtype), load16(up, i, dtype), activation), dtype);
    for (; i < I; i++) {
      const f32x16 y = gated16(splat(load1(gate, i, dtype)), splat(load1(up, i, dtype)), activation);
      store1(row, i, y[0], dtype);
    }
  }
}

/* gate_up: [T, 2 * I], the gate, then the up projection; out: [T, I]; strides in elements between rows. */
EXPORT void sluice_gated_activation(int dtype, int activation, const void *gate_up, int64_t stride, void *out,
                                    int64_t out_stride, int64_t T, int64_t I) {
  if (dtype == BFLOAT16)
    rows(BFLOAT16, activation, gate_up, stride, out, out_stride, T, I);
  else
    rows(FLOAT32, activation, gate_up, stride, out, out_stride, T, I);
}
