/* A row of logits as candidates in the order (value descending, id ascending): its maxima, and the first of it. */
#ifndef SLUICE_CANDIDATES_H
#define SLUICE_CANDIDATES_H

#include "parts.h"

#define BLOCK 64

typedef struct {
  float z;
  int32_t id;
} Candidate;

/* One row: V logits, and the maxima of every BLOCK of them. */
typedef struct {
  const void *logits;
  int64_t V;
  float *maxima;
  float temperature;
} Row;

INLINE int64_t num_maxima(const Row *row) { return (row->V + BLOCK - 1) / BLOCK; }

/* Sixteen logits from `i` on; -inf past the end of the row. */
INLINE f32x16 load_logits(const void *logits, int64_t V, int64_t i, int dtype) {
  if (i + LANES <= V) return load16(logits, i, dtype);
  f32x16 x = splat(-INFINITY);
  for (int lane = 0; i + lane < V; lane++) x[lane] = load1(logits, i + lane, dtype);
  return x;
}

/* Compute the maxima; return the largest logit, or NaN if there is one. */
INLINE float find_maxima(const Row *row, int dtype) {
  float best = -INFINITY;
  i32x16 has_nan = {0};
  for (int64_t i = 0; i < row->V; i += BLOCK) {
    f32x16 most = splat(-INFINITY);
    for (int64_t j = i; j < i + BLOCK && j < row->V; j += LANES) {
      const f32x16 x = load_logits(row->logits, row->V, j, dtype);
      has_nan |= is_nan16(x);
      most = larger16(x, most);
    }
    const float maximum = greatest16(most);
    row->maxima[i / BLOCK] = maximum;
    if (maximum > best) best = maximum;
  }
  for (int lane = 0; lane < LANES; lane++)
    if (has_nan[lane]) return NAN;
  return best;
}

/* Collect tokens with z in [low, high), in order of id; return their number. */
INLINE int64_t collect(const Row *row, float low, float high, Candidate *candidates, int dtype) {
  int64_t count = 0;
  for (int64_t i = 0; i < row->V; i += LANES) {
    if (row->maxima[i / BLOCK] / row->temperature < low) continue;
    const f32x16 z = load_logits(row->logits, row->V, i, dtype) / row->temperature;
    const i32x16 kept = at_least16(z, splat(low)) & above16(splat(high), z);
    for (int lane = 0; lane < LANES; lane++) {
      candidates[count] = (Candidate){z[lane], (int32_t)i + lane};
      count -= kept[lane];
    }
  }
  return count;
}

INLINE int comes_before(Candidate a, Candidate b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

INLINE void swap(Candidate *a, Candidate *b) {
  const Candidate c = *a;
  *a = *b;
  *b = c;
}

/* The median of the first, the middle and the last, which makes sorted input the best case instead of the worst. */
INLINE Candidate pivot_of(const Candidate *c, int64_t low, int64_t high) {
  const Candidate a = c[low], b = c[low + (high - 1 - low) / 2], d = c[high - 1];
  if (comes_before(a, b)) return comes_before(b, d) ? b : comes_before(a, d) ? d : a;
  return comes_before(a, d) ? a : comes_before(b, d) ? d : b;
}

/* Move those of [low, high) that precede `pivot`, then it, to the front; return its position. */
static int64_t partition(Candidate *c, int64_t low, int64_t high, Candidate pivot) {
  int64_t end = low;
  for (int64_t i = low; i < high; i++)
    if (comes_before(c[i], pivot)) swap(&c[i], &c[end++]);
  for (int64_t i = end; i < high; i++)
    if (c[i].id == pivot.id) {
      swap(&c[i], &c[end]);
      break;
    }
  return end;
}

/* Move the first `k` in the order to the front, themselves unordered (Hoare's selection). */
static void select_first(Candidate *c, int64_t count, int64_t k) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = partition(c, low, high, pivot_of(c, low, high));
    if (middle == k || middle + 1 == k) return;
    if (middle < k)
      low = middle + 1;
    else
      high = middle;
  }
}

/* The k-th largest of `count` floats, which it reorders. */
static float kth_largest(float *x, int64_t count, int64_t k) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const float pivot = x[low + (high - low) / 2];
    int64_t i = low, j = high;
    while (i <= j) {
      while (x[i] > pivot) i++;
      while (x[j] < pivot) j--;
      if (i <= j) {
        const float y = x[i];
        x[i++] = x[j];
        x[j--] = y;
      }
    }
    if (k - 1 <= j)
      high = j;
    else if (k - 1 >= i)
      low = i;
    else
      break;
  }
  return x[k - 1];
}

/* Candidates for the first `k`: all that are at least `bound`, and at least the k-th largest maximum, which k tokens
   reach. `scratch`: as many floats as there are maxima. */
INLINE int64_t collect_first(const Row *row, int64_t k, float bound, float *scratch, Candidate *candidates, int dtype) {
  if (k <= num_maxima(row)) {
    memcpy(scratch, row->maxima, sizeof(float) * num_maxima(row));
    bound = fmaxf(bound, kth_largest(scratch, num_maxima(row), k) / row->temperature);
  }
  const int64_t count = collect(row, bound, INFINITY, candidates, dtype);
  if (k >= count) return count;
  select_first(candidates, count, k);
  return k;
}

#endif
