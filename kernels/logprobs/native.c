/* Log-probabilities of rows: the normaliser, and the first of a row in the order (value descending, id ascending). */
#include <stdlib.h>

#include "../candidates.h"

#define RUN_SIZE 1024 /* exponentials that are added in float; their sums are added in double */

typedef struct {
  const char *logits; /* [R, V] with a stride */
  const int64_t *rows, *tokens; /* [A] */
  float *chosen, *values; /* [A], [A, K] */
  int64_t *ids;           /* [A, K] */
  Candidate *scratch;
  int64_t stride, A, K, V;
  int dtype;
} Asked;

/* log(sum(exp(x))), in one order. */
INLINE float normaliser_of(const Row *row, float maximum, int dtype) {
  double total = 0;
  for (int64_t first = 0; first < row->V; first += RUN_SIZE) {
    f32x16 sums = splat(0);
    for (int64_t i = first; i < first + RUN_SIZE && i < row->V; i += LANES) {
      const f32x16 x = load_logits(row->logits, row->V, i, dtype);
      sums += zero_if_hidden16(exp16(x - maximum), x);
    }
    total += (double)sum16(sums);
  }
  return (float)((double)maximum + log(total));
}

static int compare(const void *a, const void *b) {
  const Candidate x = *(const Candidate *)a, y = *(const Candidate *)b;
  return comes_before(x, y) ? -1 : comes_before(y, x);
}

INLINE void measure_row(const Asked *a, int64_t number, float *floats, Candidate *candidates, int dtype) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4, K = a->K;
  const Row row = {a->logits + a->rows[number] * a->stride * size, a->V, floats, 1.0f};
  const float maximum = find_maxima(&row, dtype);
  float *values = a->values + number * K;
  int64_t *ids = a->ids + number * K;
  if (!(maximum > -INFINITY && maximum < INFINITY)) {
    a->chosen[number] = NAN;
    for (int64_t k = 0; k < K; k++) values[k] = NAN, ids[k] = k;
    return;
  }
  const float normaliser = normaliser_of(&row, maximum, dtype);
  a->chosen[number] = load1(row.logits, a->tokens[number], dtype) - normaliser;
  if (!K) return;
  collect_first(&row, K, -INFINITY, floats + num_maxima(&row), candidates, dtype);
  qsort(candidates, (size_t)K, sizeof *candidates, compare);
  for (int64_t k = 0; k < K; k++) values[k] = candidates[k].z - normaliser, ids[k] = candidates[k].id;
}

static void measure_part(const void *argument, Team *team) {
  const Asked *a = argument;
  /* V + 16 candidates, then two lists of maxima in less than as many floats. */
  Candidate *candidates = a->scratch + team->index * 2 * (a->V + LANES);
  float *floats = (float *)(candidates + a->V + LANES);
  for (int number; (number = next_task(team, (int)a->A)) >= 0;)
    if (a->dtype == BFLOAT16)
      measure_row(a, number, floats, candidates, BFLOAT16);
    else
      measure_row(a, number, floats, candidates, FLOAT32);
}

/* logits: [R, V], `stride` elements between rows; rows, tokens, chosen: [A]; values, ids: [A, K]; scratch:
   [num_threads, 2 * (V + 16)] words of 8 bytes. */
EXPORT void sluice_logprobs(int dtype, const void *logits, int64_t stride, const int64_t *rows, const int64_t *tokens,
                            float *chosen, float *values, int64_t *ids, void *scratch, int64_t A, int64_t K, int64_t V,
                            int num_threads) {
  const Asked a = {logits, rows, tokens, chosen, values, ids, scratch, stride, A, K, V, dtype};
  run_team(measure_part, &a, A > 1 && A * V >= PARALLEL_ELEMENTS ? num_threads : 1);
}
