/* Penalties on the tokens that a sequence has seen. */
#include "../parts.h"

typedef struct {
  float *logits;         /* [E, V] with a stride */
  const int32_t *seen;   /* [P, V] with a stride */
  const int32_t *listed; /* [P, V] with the same stride: the tokens with a count; NULL if they are not listed */
  const int32_t *lengths; /* [P]: how many they are */
  const int32_t *places; /* [E]; -1 for none */
  const int32_t *extras; /* [E, K]; -1 for none */
  const float *repetition, *frequency, *presence; /* [E] */
  int64_t logits_stride, seen_stride, K, E, V;
} Penalties;

/* Each operation is rounded by itself, as torch does: the stores keep the compiler from fusing them. */
static float penalised(float x, int32_t seen, const Penalties *by, int64_t row) {
  const float count = (float)(seen >> 1);
  volatile float scaled = x > 0 ? x / by->repetition[row] : x * by->repetition[row];
  volatile float product = by->frequency[row] * count;
  return scaled - (product + (count > 0 ? by->presence[row] : 0.0f));
}

/* Whether any of sixteen is not 0: most tokens were never seen. */
INLINE int any16(const int32_t *x) {
  uint64_t pairs[LANES / 2];
  memcpy(pairs, x, sizeof pairs);
  uint64_t any = 0;
  for (int i = 0; i < LANES / 2; i++) any |= pairs[i];
  return any != 0;
}

static int32_t num_equal(const int32_t *extras, int64_t num_extras, int64_t token) {
  int32_t count = 0;
  for (int64_t k = 0; k < num_extras; k++) count += extras[k] == token;
  return count;
}

static void penalise_token(const Penalties *by, int64_t row, float *logits, const int32_t *seen, int64_t token) {
  const int32_t *extras = by->extras + row * by->K;
  logits[token] = penalised(logits[token], seen[token] + 2 * num_equal(extras, by->K, token), by, row);
}

/* Penalise what has a count, found by reading all counts. */
static void penalise_counted(const Penalties *by, int64_t row, float *logits, const int32_t *seen) {
  for (int64_t first = 0; first < by->V; first += LANES) {
    const int64_t end = first + LANES < by->V ? first + LANES : by->V;
    if (end - first == LANES && !any16(seen + first)) continue;
    for (int64_t token = first; token < end; token++)
      if (seen[token]) penalise_token(by, row, logits, seen, token);
  }
}

static void penalise_row(const Penalties *by, int64_t row) {
  const int64_t place = by->places[row];
  if (place < 0) return;
  float *logits = by->logits + row * by->logits_stride;
  const int32_t *seen = by->seen + place * by->seen_stride, *extras = by->extras + row * by->K;
  if (by->listed) {
    const int32_t *listed = by->listed + place * by->seen_stride;
    for (int64_t i = 0; i < by->lengths[place]; i++) penalise_token(by, row, logits, seen, listed[i]);
  } else {
    penalise_counted(by, row, logits, seen);
  }
  for (int64_t k = 0; k < by->K; k++) {
    const int64_t token = extras[k];
    /* Those that are seen are done; of equal ones, the first stands for all. */
    if (token < 0 || seen[token] || num_equal(extras, k, token)) continue;
    logits[token] = penalised(logits[token], 2 * num_equal(extras, by->K, token), by, row);
  }
}

static void penalise_part(const void *argument, Team *team) {
  const Penalties *by = argument;
  for (int row; (row = next_task(team, (int)by->E)) >= 0;) penalise_row(by, row);
}

EXPORT void sluice_penalties(float *logits, int64_t logits_stride, const int32_t *seen, const int32_t *listed,
                             const int32_t *lengths, const int32_t *places, const int32_t *extras, int64_t K,
                             int64_t seen_stride, const float *repetition, const float *frequency,
                             const float *presence, int64_t num_rows, int64_t V, int num_threads) {
  const Penalties by = {logits,    seen,     listed,        lengths,     places, extras,   repetition,
                        frequency, presence, logits_stride, seen_stride, K,      num_rows, V};
  run_team(penalise_part, &by, num_rows > 1 && num_rows * V >= PARALLEL_ELEMENTS ? num_threads : 1);
}
