/* Mixtures of experts: which experts compute a row, where their rows lie, and the sum of what they say. The products
   are those of linear/native.c. */
#include "../parts.h"

#define BESIDE 4 /* experts that share the loads of a row */

/* Scores of `count` experts, from `e` on: each is summed along M in lanes, which are added in their order. */
INLINE void score(const Router *r, const void *x, int64_t e, int count, float *scores, int dtype) {
  floats sums[BESIDE];
  int64_t m = 0;
  for (int i = 0; i < count; i++) sums[i] = (floats){0};
  if (dtype == BFLOAT16) {
    for (; m + 2 * WIDTH <= r->M; m += 2 * WIDTH) {
      const words pairs = *(const words *)((const uint16_t *)x + m);
      for (int i = 0; i < count; i++) {
        const words weight = *(const words *)((const uint16_t *)r->weight + (e + i) * r->M + m);
        sums[i] += low_float(pairs) * low_float(weight);
        sums[i] += high_float(pairs) * high_float(weight);
      }
    }
  } else {
    for (; m + WIDTH <= r->M; m += WIDTH) {
      const floats row = *(const floats *)((const float *)x + m);
      for (int i = 0; i < count; i++) sums[i] += row * *(const floats *)((const float *)r->weight + (e + i) * r->M + m);
    }
  }
  for (int i = 0; i < count; i++) {
    float total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += sums[i][lane];
    for (int64_t at = m; at < r->M; at++) total += load1(x, at, dtype) * load1(r->weight, (e + i) * r->M + at, dtype);
    scores[e + i] = total;
  }
}

INLINE void score_all(const Router *r, const void *x, int64_t first, int64_t end, float *scores, int dtype) {
  int64_t e = first;
  for (; e + BESIDE <= end; e += BESIDE) score(r, x, e, BESIDE, scores, dtype);
  for (; e < end; e++) score(r, x, e, 1, scores, dtype);
}

void score_experts(const Router *router, const void *x, int64_t first, int64_t end, float *scores, int dtype) {
  if (dtype == BFLOAT16)
    score_all(router, x, first, end, scores, BFLOAT16);
  else
    score_all(router, x, first, end, scores, FLOAT32);
}

/* Replace each of `count` by its exponential, those of `largest` being 1; return their sum in order. */
INLINE float exponentials(float *x, int64_t count, float largest) {
  float total = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    const int some = count - i < LANES ? (int)(count - i) : LANES;
    f32x16 lanes = splat(0);
    for (int lane = 0; lane < some; lane++) lanes[lane] = x[i + lane] - largest;
    lanes = exp16(lanes);
    for (int lane = 0; lane < some; lane++) total += x[i + lane] = lanes[lane];
  }
  return total;
}

void choose_experts(const Router *r, float *scores, int32_t *experts, float *shares) {
  const int64_t k = r->num_chosen;
  int64_t count = 0;
  for (int64_t e = 0; r->bias && e < r->E; e++) scores[e] += r->bias[e];
  for (int64_t e = 0; e < r->E; e++) {
    if (count == k && !(scores[e] > shares[k - 1])) continue;
    int64_t rank = count < k ? count++ : k - 1;
    for (; rank > 0 && scores[e] > shares[rank - 1]; rank--) {
      shares[rank] = shares[rank - 1];
      experts[rank] = experts[rank - 1];
    }
    shares[rank] = scores[e];
    experts[rank] = (int32_t)e;
  }
  const float largest = shares[0];
  float total = exponentials(shares, k, largest);
  if (!r->is_normalised) total = exponentials(scores, r->E, largest);
  for (int64_t rank = 0; rank < k; rank++) shares[rank] /= total;
  if (r->has_shared) {
    const f32x16 e = exp16(splat(-scores[r->E]));
    shares[k] = 1.0f / (1.0f + e[0]);
  }
}

void group_rows(const int32_t *experts, int64_t pairs, int64_t E, int64_t most, int32_t *places, ExpertBlock *blocks,
                int64_t *num_blocks, int32_t *counts) {
  int32_t first = 0;
  int64_t number = 0;
  memset(counts, 0, E * sizeof *counts);
  for (int64_t p = 0; p < pairs; p++) counts[experts[p]]++;
  for (int64_t e = 0; e < E; e++) {
    const int32_t count = counts[e];
    for (int32_t at = 0; at < count; at += (int32_t)most)
      blocks[number++] = (ExpertBlock){(int32_t)e, first + at, count - at < most ? count - at : (int32_t)most};
    counts[e] = first;
    first += (count + 7) / 8 * 8;
  }
  for (int64_t p = 0; p < pairs; p++) places[p] = counts[experts[p]]++;
  *num_blocks = number;
}

void combine_row(int dtype, const void *rows, int64_t stride, const int32_t *places, const float *shares,
                 const void *shared, void *out, int64_t M, int64_t k) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
  int64_t i = 0;
  for (; i + LANES <= M; i += LANES) {
    f32x16 total = splat(0);
    for (int64_t rank = 0; rank < k; rank++)
      total += load16((const char *)rows + places[rank] * stride * size, i, dtype) * shares[rank];
    if (shared) total += load16(shared, i, dtype) * shares[k];
    store16(out, i, total, dtype);
  }
  for (; i < M; i++) {
    float total = 0;
    for (int64_t rank = 0; rank < k; rank++)
      total += load1((const char *)rows + places[rank] * stride * size, i, dtype) * shares[rank];
    if (shared) total += load1(shared, i, dtype) * shares[k];
    store1(out, i, total, dtype);
  }
}

/* x: [T, M], rows x_stride elements apart; weight: [E, M], or [E + 1, M] with a shared expert; bias: [E] float32, or
   null; scores: room for [T, E + has_shared]; experts: [T, k]; shares: [T, k + has_shared]. */
EXPORT void sluice_route(int dtype, const void *x, int64_t x_stride, const void *weight, const float *bias, int64_t T,
                         int64_t M, int64_t E, int64_t k, int has_shared, int is_normalised, float *scores,
                         int32_t *experts, float *shares) {
  const Router r = {weight, bias, E, M, k, is_normalised, has_shared};
  const int64_t size = dtype == BFLOAT16 ? 2 : 4, width = E + has_shared;
#pragma omp parallel for if (T * width * M >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++) {
    score_experts(&r, (const char *)x + t * x_stride * size, 0, width, scores + t * width, dtype);
    choose_experts(&r, scores + t * width, experts + t * k, shares + t * (k + has_shared));
  }
}

/* rows: [P, M], `stride` elements apart; places: [T, k]; shares: [T, k], or [T, k + 1] with `shared`, [T, M] or null,
   whose rows are shared_stride elements apart; out: [T, M]. */
EXPORT void sluice_combine(int dtype, const void *rows, int64_t stride, const int32_t *places, const float *shares,
                           const void *shared, int64_t shared_stride, void *out, int64_t T, int64_t M, int64_t k) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
#pragma omp parallel for if (T * M >= PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < T; t++)
    combine_row(dtype, rows, stride, places + t * k, shares + t * (k + (shared != NULL)),
                shared ? (const char *)shared + t * shared_stride * size : NULL, (char *)out + t * M * size, M, k);
}
