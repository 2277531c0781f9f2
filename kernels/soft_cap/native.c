/* Logits that approach a cap: cap * tanh(x / cap). */
#include "../parts.h"

/* By 1 - 2 e / (1 + e), e the exponential of -2 |x|: exact to about a unit of 1 in the last place. A NaN stays one. */
INLINE f32x16 capped16(f32x16 x, float cap) {
  const u32x16 sign = (u32x16)x & 0x80000000u;
  const f32x16 size = (f32x16)((u32x16)x & 0x7fffffffu) / cap;
  const f32x16 e = exp16(-2.0f * size);
  return (f32x16)((u32x16)(cap * ((1.0f - e) / (1.0f + e))) | sign);
}

/* One body for whole vectors and for what is left, so that an element has the same bits wherever it is. */
INLINE void cap_run(void *x, int64_t first, int64_t end, float cap, int dtype) {
  for (int64_t i = first; i < end; i += LANES) {
    const int count = end - i < LANES ? (int)(end - i) : LANES;
    float lanes[LANES] = {0};
    if (count == LANES)
      *(f32x16 *)lanes = load16(x, i, dtype);
    else
      for (int lane = 0; lane < count; lane++) lanes[lane] = load1(x, i + lane, dtype);
    *(f32x16 *)lanes = capped16(*(f32x16 *)lanes, cap);
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
