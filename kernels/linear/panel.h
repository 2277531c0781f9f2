/* A pass over a panel of 32 columns: its sums, and what it prefetches. */
#ifndef SLUICE_PANEL_H
#define SLUICE_PANEL_H

#include "../parts.h"

#define PANEL 32
#define ROWS 32                /* the most rows of a pass */
#define AHEAD_BYTES (16 << 10) /* of a panel */

typedef union {
  float f[ROWS][PANEL];
  int32_t i[ROWS][PANEL];
} Sums;

/* Prefetch plan of a pass, in lines per step: `soon` up to the step `turn`, then `later`. */
typedef struct {
  const char *soon, *later;
  int64_t turn;
  int lines;
} Fetch;

INLINE const char *first_line(const Fetch *next, int64_t step) {
  return step < next->turn ? next->soon + step * next->lines * 64
                           : next->later + (step - next->turn) * next->lines * 64;
}

INLINE void fetch(const Fetch *next, int64_t step) {
  const char *from = first_line(next, step);
  for (int i = 0; i < next->lines; i++) __builtin_prefetch(from + i * 64, 0, 3);
}

/* Into the second-level cache: near enough for vectors; the first has too few line buffers to wait for memory and for
   the second level at once. */
INLINE void fetch_far(const Fetch *next, int64_t step) {
  const char *from = first_line(next, step);
  for (int i = 0; i < next->lines; i++) __builtin_prefetch(from + i * 64, 0, 2);
}

/* For one of `passes` over the panel at `weight`, of `steps` steps of `step_lines` lines, before the one at `next`. */
INLINE Fetch fetch_of(const char *weight, const char *next, int64_t steps, int step_lines, int64_t pass,
                      int64_t passes) {
  if (!next) next = weight;
  if (passes == 1) {
    const int64_t ahead = AHEAD_BYTES / (step_lines * 64), turn = steps < ahead ? 0 : steps - ahead;
    return (Fetch){weight + ahead * step_lines * 64, next, turn, step_lines};
  }
  const int64_t lines = (step_lines + passes - 1) / passes, first = pass * lines;
  return (Fetch){NULL, next + first * 64 * steps, 0, first < step_lines ? (int)lines : 0};
}

#endif
