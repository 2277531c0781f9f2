/* Products of one row with the low-rank matrices of an adapter (Hu et al., LoRA, arXiv 2106.09685).

   The order of each sum depends on the adapter's sizes alone, so a row's bits do not depend on other rows. */
#ifndef SLUICE_ADAPTERS_H
#define SLUICE_ADAPTERS_H

#include "../parts.h"

#define SHRUNK_AT_ONCE 4 /* rows of `down` that share the conversion of x */

/* out[i] = x times row i of `down`, [SHRUNK_AT_ONCE, K] bfloat16; K is a multiple of 32. */
INLINE void shrink(const uint16_t *down, const void *x, int64_t K, float *out) {
  floats low[SHRUNK_AT_ONCE], high[SHRUNK_AT_ONCE];
  for (int i = 0; i < SHRUNK_AT_ONCE; i++) low[i] = high[i] = (floats){0};
  for (int64_t k = 0; k < K; k += 2 * WIDTH) {
    const words pairs = *(const words *)((const uint16_t *)x + k);
    const floats left = low_float(pairs), right = high_float(pairs);
    for (int i = 0; i < SHRUNK_AT_ONCE; i++) {
      const words weights = *(const words *)(down + i * K + k);
      low[i] += left * low_float(weights);
      high[i] += right * high_float(weights);
    }
  }
  for (int i = 0; i < SHRUNK_AT_ONCE; i++) {
    const floats both = low[i] + high[i];
    float total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += both[lane];
    out[i] = total;
  }
}

/* Sixteen columns of a row, whose `shrunk` numbers are x times `down`: x times `down` times `up`. */
INLINE f32x16 expand16(const Adapter *adapter, const float *shrunk, int64_t group) {
  const int64_t num_pairs = adapter->rank / 2;
  const uint32_t *up = adapter->up + group * num_pairs * LANES;
  const float *x = shrunk + adapter->sources[group];
  f32x16 sum;
  floats low[LANES / WIDTH], high[LANES / WIDTH];
  for (int v = 0; v < LANES / WIDTH; v++) low[v] = high[v] = (floats){0};
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    const words left = broadcast(x + 2 * pair), right = broadcast(x + 2 * pair + 1);
    for (int v = 0; v < LANES / WIDTH; v++) {
      const words weights = *(const words *)(up + pair * LANES + v * WIDTH);
      low[v] += low_float(weights) * (floats)left;
      high[v] += high_float(weights) * (floats)right;
    }
  }
  for (int v = 0; v < LANES / WIDTH; v++) *((floats *)&sum + v) = low[v] + high[v];
  return sum;
}

#endif
