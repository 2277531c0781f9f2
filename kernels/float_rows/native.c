/* Copies of rows in float. */
#include "../parts.h"

typedef struct {
  const void *x; /* [R, V] with a stride */
  const int64_t *rows;
  float *out; /* [E, V] */
  int64_t stride, E, V;
  int dtype;
} Copies;

static void copy_row(const Copies *a, int64_t number) {
  const int64_t from = a->rows[number] * a->stride;
  float *out = a->out + number * a->V;
  int64_t i = 0;
  for (; i + LANES <= a->V; i += LANES) store16(out, i, load16(a->x, from + i, a->dtype), FLOAT32);
  for (; i < a->V; i++) out[i] = load1(a->x, from + i, a->dtype);
}

static void copy_part(const void *argument, Team *team) {
  const Copies *a = argument;
  for (int number; (number = next_task(team, (int)a->E)) >= 0;) copy_row(a, number);
}

/* x: [R, V] with a stride, in elements; rows: [E]; out: [E, V]. */
EXPORT void sluice_float_rows(int dtype, const void *x, int64_t stride, const int64_t *rows, float *out, int64_t E,
                              int64_t V, int num_threads) {
  const Copies a = {x, rows, out, stride, E, V, dtype};
  run_team(copy_part, &a, E > 1 && E * V >= PARALLEL_ELEMENTS ? num_threads : 1);
}
