/* Masks of rows of logits: -inf for each token whose bit is not set. */
#include "../parts.h"

/* A row of V tokens in words of 32. Most words allow all of theirs, or none: these are left alone, or not read. The
   loops of 32 have no branches, so that they are vectors. */
#define MASK_ROW(TYPE, BANNED)                                                                             \
  for (int64_t first = 0; first < V; first += 32) {                                                        \
    TYPE *x = (TYPE *)row + first;                                                                         \
    const uint32_t word = mask[first / 32];                                                                \
    if (word == UINT32_MAX) continue;                                                                      \
    if (V - first < 32)                                                                                    \
      for (int bit = 0; bit < V - first; bit++) x[bit] = word >> bit & 1 ? x[bit] : (TYPE)BANNED;          \
    else if (word == 0)                                                                                    \
      for (int bit = 0; bit < 32; bit++) x[bit] = (TYPE)BANNED;                                            \
    else                                                                                                   \
      for (int bit = 0; bit < 32; bit++) x[bit] = word >> bit & 1 ? x[bit] : (TYPE)BANNED;                 \
  }

static void mask_float32(void *row, const uint32_t *mask, int64_t V) { MASK_ROW(uint32_t, 0xFF800000u) }

static void mask_bfloat16(void *row, const uint32_t *mask, int64_t V) { MASK_ROW(uint16_t, 0xFF80u) }

/* On one thread: a row takes a few microseconds.

   logits: [R, V] with a stride, in elements; rows: [M]; masks: [M, ceil(V / 32)]. */
EXPORT void sluice_token_masks(int dtype, void *logits, int64_t stride, const int64_t *rows, const uint32_t *masks,
                               int64_t num_masks, int64_t V) {
  for (int64_t number = 0; number < num_masks; number++) {
    const uint32_t *mask = masks + number * ((V + 31) / 32);
    const int64_t at = rows[number] * stride;
    if (dtype == BFLOAT16)
      mask_bfloat16((uint16_t *)logits + at, mask, V);
    else
      mask_float32((float *)logits + at, mask, V);
  }
}
