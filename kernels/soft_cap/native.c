/* Soft cap of logits: cap * tanh(x / cap). */
#include "../parts.h"

/* One body for whole vectors and the remainder, so that an element has the same bits at any position. */
INLINE void cap_run(void *x, int64_t first, int64_t end, float cap, int dtype) {
  for (int64_t i = first; i < end; i += LANES) {
    const int count = end - i < LANES ? (int)(end - i) : LANES;
    float lanes[LANES] = {0};
    if (count == LANES)
      *(f32x16 *)lanes = load16(x, i, dtype);
    else
      for (int lane = 0; lane < count; lane++) lanes[lane] = load1(x, i + lane, dtype);
    *(f32x16 *)lanes = cap * tanh16(*(f32x16 *)lanes / cap);
    if (count == LANES)
      store16(x, i, *(f32x16 *)lanes, dtype);
    else
      for (int lane = 0; lane < count; lane++) store1(x, i + lane, lanes[lane], dtype);
  }
}

void soft_cap_run(int dtype, void *x, int64_t first, int64_t end, float cap) {
  if (dtype == BFLOAT16)
    cap_run(x, first, end, cap, BFLOAT16);
  else
    cap_run(x, first, end, cap, FLOAT32);
}

/* x: [size], changed in place; cap above 0. */
EXPORT void sluice_soft_cap(int dtype, void *x, int64_t size, float cap) {
  RUN_PARTS(size >= PARALLEL_ELEMENTS,
            soft_cap_run(dtype, x, share_begin(&team, size), share_end(&team, size), cap));
}
