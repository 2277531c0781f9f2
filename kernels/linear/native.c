/* Products with packed weights, for few rows (memory-bound) and for many.

   A task is a panel of 32 columns for a block of rows: sums of some rows by 32 in registers (AMX tiles or vectors),
   along all of K in order, so that a row's result does not depend on the other rows. The next data is prefetched
   explicitly: the hardware prefetcher is slower. A panel used by one pass is prefetched shortly before; a panel used by
   several passes stays in the caches, so these passes prefetch the next panel, each a part of it. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* the rows of a pass stay in registers only if all loops over them are unrolled */
#endif
#include "../tiles.h"
#include "adapters.h"
#include "groups.h"

#define STEP 16                    /* words of a row in one step */
#define STEP_BYTES (STEP * PANEL * 4)
#define STEP_LINES (STEP_BYTES / 64)
#define DOT_ROWS 8                 /* rows of one pass with dot products of vectors: 16 sums, a number that needs few
                                      address registers */
#if defined(__AVX512BW__)
#define WIDE_ROWS 12               /* the same with plain vectors: they share the conversion of a weight, and their sums
                                      stay in registers */
#define WHOLE_ROWS WIDE_ROWS
#else
#define WIDE_ROWS 6
#define WHOLE_ROWS 3               /* rows of which the registers hold the sums of a whole panel, not of half of it */
#endif
#define BLOCK_BYTES (1 << 20)      /* rows of x that all panels process before the next block of rows */

/* Whether one instruction adds the products of two bfloat16, or of four int8, in each lane. */
#if defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
#if defined(__AVX512VNNI__)
#define HAS_INT8_DOT 1
#else
#define HAS_INT8_DOT 0
#endif
#define HAS_DOT(kind) ((kind) == INT8 ? HAS_INT8_DOT : HAS_BF16_DOT)

#if HAS_TILES
/* Tiles: 0 to 3 sums, 4 and 5 x, 6 and 7 the weight. The upper 16 rows use 0, 1, 4, the lower 2, 3, 5. */
INLINE void configure(int num_rows) {
  const int upper = num_rows < 16 ? num_rows : 16, lower = num_rows > 16 ? num_rows - 16 : 1;
  TileConfig config = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = (uint8_t)(t >= 6 ? 16 : t == 2 || t == 3 || t == 5 ? lower : upper);
  }
  load_tile_config(&config);
}

#define MULTIPLY(sums, x, weight)          \
  do {                                     \
    if (kind == INT8)                      \
      _tile_dpbssd(sums, x, weight);       \
    else                                   \
      _tile_dpbf16ps(sums, x, weight);     \
  } while (0)

INLINE void multiply_tiles(Sums *sums, const char *x, int64_t stride, const char *panel, int64_t steps, int has_lower,
                           Fetch next, int kind) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; s++) {
    const char *weight = panel + s * STEP_BYTES;
    _tile_loadd(4, x + s * 64, stride);
    _tile_loadd(6, weight, 64);
    MULTIPLY(0, 4, 6);
    _tile_loadd(7, weight + 1024, 64);
    MULTIPLY(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, x + 16 * stride + s * 64, stride);
      MULTIPLY(2, 5, 6);
      MULTIPLY(3, 5, 7);
    }
    fetch(&next, s);
  }
  _tile_stored(0, sums->f[0], sizeof sums->f[0]);
  _tile_stored(1, sums->f[0] + 16, sizeof sums->f[0]);
  if (!has_lower) return;
  _tile_stored(2, sums->f[16], sizeof sums->f[0]);
  _tile_stored(3, sums->f[16] + 16, sizeof sums->f[0]);
}
#endif

#if HAS_BF16_DOT || HAS_INT8_DOT
/* acc += x * y for sixteen columns: two bfloat16 products, or four of int8, a lane. Called for what HAS_DOT says. */
INLINE f32x16 dot_bf16(f32x16 acc, u32x16 weight, uint32_t x) {
#if HAS_BF16_DOT
  acc = (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)weight);
#else
  (void)weight, (void)x;
#endif
  return acc;
}

/* One operand is unsigned here, so 128 is added to each weight. */
INLINE i32x16 dot_int8(i32x16 acc, u32x16 weight, uint32_t x) {
#if HAS_INT8_DOT
  const __m512i above = (__m512i)(weight ^ 0x80808080u);
  acc = (i32x16)_mm512_dpbusd_epi32((__m512i)acc, above, _mm512_set1_epi32((int)x));
#else
  (void)weight, (void)x;
#endif
  return acc;
}

/* Initial value of a row's sums: what the 128 would add. */
INLINE i32x16 before_int8(const char *row, int64_t steps) {
  i32x16 sum = {0};
#if HAS_INT8_DOT
  for (int64_t s = 0; s < steps; s++)
    sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi8((char)0x80), _mm512_loadu_si512(row + s * 64));
  sum = (i32x16)_mm512_set1_epi32(-_mm512_reduce_add_epi32((__m512i)sum));
#else
  (void)row, (void)steps;
#endif
  return sum;
}

/* Sums of `num_rows` rows by dot products. */
INLINE void multiply_dots(Sums *sums, int num_rows, const char *x, int64_t stride, const char *panel, int64_t steps,
                          Fetch next, int kind) {
  f32x16 f[DOT_ROWS][2];
  i32x16 i[DOT_ROWS][2];
  for (int r = 0; r < num_rows; r++) {
    f[r][0] = f[r][1] = splat(0);
    i[r][0] = i[r][1] = kind == INT8 ? before_int8(x + r * stride, steps) : (i32x16){0};
  }
  for (int64_t s = 0; s < steps; s++) {
    const u32x16 *weight = (const u32x16 *)(panel + s * STEP_BYTES);
    for (int u = 0; u < STEP; u++) {
      const u32x16 left = weight[u], right = weight[STEP + u];
      for (int r = 0; r < num_rows; r++) {
        const uint32_t word = *(const uint32_t *)(x + r * stride + (s * STEP + u) * 4);
        if (kind == INT8) {
          i[r][0] = dot_int8(i[r][0], left, word);
          i[r][1] = dot_int8(i[r][1], right, word);
        } else {
          f[r][0] = dot_bf16(f[r][0], left, word);
          f[r][1] = dot_bf16(f[r][1], right, word);
        }
      }
    }
    fetch_far(&next, s);
  }
  for (int r = 0; r < num_rows; r++)
    for (int half = 0; half < 2; half++)
      if (kind == INT8)
        *(i32x16 *)(sums->i[r] + half * 16) = i[r][half];
      else
        *(f32x16 *)(sums->f[r] + half * 16) = f[r][half];
}
#endif

typedef int16_t halves __attribute__((vector_size(WIDTH * 4), may_alias));

/* Two of the four int8 of each word, as 16 bits. */
INLINE halves low_int8(words fours) { return (halves)((halves)fours << 8) >> 8; }
INLINE halves high_int8(words fours) { return (halves)fours >> 8; }

/* Add the two products in each lane; exact. */
INLINE void add_products(ints *acc, halves x, halves y) {
#if defined(__AVX512BW__)
  *acc += (ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  const ints products = (ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
  __asm__("vpaddd %1, %0, %0" : "+x"(*acc) : "x"(products)); /* see add_product */
#else
  *acc += ((ints)x << 16 >> 16) * ((ints)y << 16 >> 16);
  *acc += ((ints)x >> 16) * ((ints)y >> 16);
#endif
}

/* Half of each word: a float, or two of the four int8. */
INLINE words half_of(words w, int is_high, int kind) {
  if (kind == INT8) return is_high ? (words)high_int8(w) : (words)low_int8(w);
  return is_high ? (words)high_float(w) : (words)low_float(w);
}

/* Sums of rows by vectors of columns, in registers: of floats, or of INT8. */
typedef struct {
  floats f[WIDE_ROWS][PANEL / WIDTH];
  ints i[WIDE_ROWS][PANEL / WIDTH];
} WideSums;

INLINE void add_words(WideSums *sums, int r, int v, words w, words y, int kind) {
  if (kind == INT8)
    add_products(&sums->i[r][v], (halves)w, (halves)y);
  else
    add_product(&sums->f[r][v], (floats)w, (floats)y);
}

/* Add one half of the words w times that of word u of x, [num_rows, STEP]. Of rows and vectors, the fewer are kept in
   registers beside the sums, and the others come one by one. */
INLINE void add_half(WideSums *sums, int num_rows, int count, const words *w, const uint32_t (*x)[STEP], int u,
                     int is_high, int kind) {
  words kept[WIDE_ROWS];
  if (num_rows < count) {
    for (int r = 0; r < num_rows; r++) kept[r] = broadcast(x[r] + u);
    for (int v = 0; v < count; v++) {
      const words half = half_of(w[v], is_high, kind);
      for (int r = 0; r < num_rows; r++) add_words(sums, r, v, half, kept[r], kind);
    }
    return;
  }
  for (int v = 0; v < count; v++) kept[v] = half_of(w[v], is_high, kind);
  for (int r = 0; r < num_rows; r++) {
    const words y = broadcast(x[r] + u);
    for (int v = 0; v < count; v++) add_words(sums, r, v, kept[v], y, kind);
  }
}

/* Sums of `num_rows` rows by `num_columns` columns of a panel, from `column` on, by plain vectors. */
INLINE void multiply_wide(Sums *sums, int num_rows, int num_columns, int column, const char *x, int64_t stride,
                          const char *panel, int64_t steps, Fetch next, int kind) {
  const int count = num_columns / WIDTH;
  const char *weight = panel + column / LANES * (STEP_BYTES / 2);
  WideSums wide;
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < count; v++) wide.f[r][v] = (floats){0}, wide.i[r][v] = (ints){0};
  /* Both halves of a step's words of x, prepared once for all columns. */
  uint32_t low[WIDE_ROWS][STEP] __attribute__((aligned(64))), high[WIDE_ROWS][STEP] __attribute__((aligned(64)));
  for (int64_t s = 0; s < steps; s++) {
    for (int r = 0; r < num_rows; r++)
      for (int u = 0; u < STEP; u += WIDTH) {
        const words both = *(const words *)(x + r * stride + (s * STEP + u) * 4);
        *(words *)(low[r] + u) = half_of(both, 0, kind);
        *(words *)(high[r] + u) = half_of(both, 1, kind);
      }
    for (int u = 0; u < STEP; u++) {
      words w[PANEL / WIDTH];
      for (int v = 0; v < count; v++) {
        const int from = v * WIDTH;
        w[v] = *(const words *)(weight + s * STEP_BYTES + ((from / LANES * STEP + u) * LANES + from % LANES) * 4);
      }
      /* All rows with one half of the words, then all with the other: a sum waits for its last addition. */
      add_half(&wide, num_rows, count, w, low, u, 0, kind);
      add_half(&wide, num_rows, count, w, high, u, 1, kind);
    }
    fetch_far(&next, s);
  }
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < count; v++)
      if (kind == INT8)
        *(ints *)(sums->i[r] + column + v * WIDTH) = wide.i[r][v];
      else
        *(floats *)(sums->f[r] + column + v * WIDTH) = wide.f[r][v];
}

/* Sums of `num_rows` rows by vectors. */
INLINE void multiply_rows(Sums *sums, int num_rows, const char *x, int64_t stride, const char *panel, int64_t steps,
                          int64_t span, Fetch next, int kind) {
  if (kind >= GROUPS4) {
    if (num_rows <= GROUP_ROWS) multiply_groups(sums, num_rows, (const XGroup *)x, panel, steps, span, next, kind);
    return;
  }
#if HAS_BF16_DOT || HAS_INT8_DOT
  if (HAS_DOT(kind)) {
    if (num_rows <= DOT_ROWS) multiply_dots(sums, num_rows, x, stride, panel, steps, next, kind);
    return;
  }
#endif
  if (num_rows > WIDE_ROWS) return;
  if (num_rows <= WHOLE_ROWS) {
    multiply_wide(sums, num_rows, PANEL, 0, x, stride, panel, steps, next, kind);
    return;
  }
  for (int column = 0; column < PANEL; column += PANEL / 2) {
    multiply_wide(sums, num_rows, PANEL / 2, column, x, stride, panel, steps, next, kind);
    next.lines = 0;
  }
}

/* The same for a number of rows unknown at compile time. */
INLINE void multiply_vectors(Sums *sums, int num_rows, const char *x, int64_t stride, const char *panel, int64_t steps,
                             int64_t span, Fetch next, int kind) {
#define CASE(n) \
  case n: multiply_rows(sums, n, x, stride, panel, steps, span, next, kind); break;
  switch (num_rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

/* Sixteen columns of a row, from `column` on, as floats with scale and bias; 0 past the last column. */
INLINE f32x16 scaled(const Sums *sums, int row, int half, const Product *a, int64_t t, int64_t column, int kind) {
  const Weight *w = a->weight;
  const int64_t left = w->N - column;
  f32x16 y = kind == INT8 ? __builtin_convertvector(*(const i32x16 *)(sums->i[row] + half * 16), f32x16)
                          : *(const f32x16 *)(sums->f[row] + half * 16);
  if (left >= LANES) {
    if (kind == INT8) y *= a->x_scales[t] * *(const f32x16 *)(w->scales + column);
    if (w->bias) y += load16(w->bias, column, BFLOAT16);
    return y;
  }
  for (int lane = 0; lane < left; lane++) {
    if (kind == INT8) y[lane] *= a->x_scales[t] * w->scales[column + lane];
    if (w->bias) y[lane] += load1(w->bias, column + lane, BFLOAT16);
  }
  return y;
}

/* The same, with what the row's adapter adds. */
INLINE f32x16 finished(const Sums *sums, int row, int half, const Product *a, int64_t t, int64_t column, int kind) {
  f32x16 y = scaled(sums, row, half, a, t, column, kind);
  const Adapter *adapter = adapter_of(&a->adapters, t);
  if (adapter) y += expand16(adapter, a->adapters.shrunk + t * a->adapters.stride, column / LANES);
  return y;
}

/* Store, or add to, the valid columns of sixteen. */
INLINE void put(char *row, int64_t column, int64_t left, f32x16 y, int adds) {
  if (left >= LANES) {
    if (adds) {
      uint16_t narrow[LANES];
      store16(narrow, 0, y, BFLOAT16);
      y = load16(row, column, BFLOAT16) + load16(narrow, 0, BFLOAT16);
    }
    store16(row, column, y, BFLOAT16);
    return;
  }
  for (int lane = 0; lane < left; lane++) {
    const float before = adds ? load1(row, column + lane, BFLOAT16) : 0;
    store1(row, column + lane, adds ? before + rounded(y[lane], BFLOAT16) : y[lane], BFLOAT16);
  }
}

INLINE void finish(const Sums *sums, const Product *a, int64_t first, int num_rows, int64_t panel, int kind) {
  for (int r = 0; r < num_rows; r++) {
    const int64_t t = first + r, column = panel * PANEL, N = a->weight->N;
    char *row = a->out + t * a->out_stride;
    const f32x16 left = finished(sums, r, 0, a, t, column, kind);
    if (a->epilogue >= GATE_SILU) {
      const f32x16 right = finished(sums, r, 1, a, t, column + LANES, kind);
      put(row, column / 2, N / 2 - column / 2, gated16(left, right, a->epilogue - GATE_SILU), 0);
      continue;
    }
    put(row, column, N - column, left, a->epilogue == ADD);
    if (N - column > LANES)
      put(row, column + LANES, N - column - LANES, finished(sums, r, 1, a, t, column + LANES, kind),
          a->epilogue == ADD);
  }
}

/* A panel is read in steps: of whole lines of words, or of groups. */
INLINE int64_t num_steps(const Weight *w) {
  const int64_t in_step = w->kind >= GROUPS4 ? GROUP : STEP * (w->kind == INT8 ? 4 : 2);
  return (w->K + in_step - 1) / in_step;
}

INLINE int64_t panel_bytes(const Weight *w) {
  return w->kind >= GROUPS4 ? groups_panel_bytes(w) : num_steps(w) * STEP_BYTES;
}

/* Bytes of a row of x, in the form that the weight's product takes. */
INLINE int64_t row_bytes(const Weight *w) {
  return num_steps(w) * (w->kind >= GROUPS4 ? (int64_t)sizeof(XGroup) : STEP * 4);
}

INLINE int64_t num_panels(const Weight *w) { return (w->N + PANEL - 1) / PANEL; }

INLINE const char *panel_at(const Weight *w, int64_t panel) {
  return w->panels + panel * panel_bytes(w);
}

#if HAS_TILES
/* Rows first to end of one panel; `configured`: the rows that the tiles are configured for. */
INLINE void multiply_panel_tiles(const Product *a, int64_t first, int64_t end, int64_t panel, const char *next,
                                 int *configured, int kind) {
  const int64_t steps = num_steps(a->weight), passes = (end - first + ROWS - 1) / ROWS;
  const char *weight = panel_at(a->weight, panel);
  Sums sums __attribute__((aligned(64)));
  for (int64_t t = first; t < end; t += ROWS) {
    const int num_rows = end - t < ROWS ? (int)(end - t) : ROWS;
    const char *x = a->x + t * a->x_stride;
    const Fetch fetch = fetch_of(weight, next, steps, STEP_LINES, (t - first) / ROWS, passes);
    if (num_rows != *configured) configure(*configured = num_rows);
    if (num_rows > 16)
      multiply_tiles(&sums, x, a->x_stride, weight, steps, 1, fetch, kind);
    else
      multiply_tiles(&sums, x, a->x_stride, weight, steps, 0, fetch, kind);
    finish(&sums, a, t, num_rows, panel, kind);
  }
}
#endif

/* Rows first to end of one panel, in passes of about as many rows each, or as x has them beside each other. */
INLINE void multiply_panel(const Product *a, int64_t first, int64_t end, int64_t panel, const char *next, int kind) {
  const int most = kind >= GROUPS4 ? GROUP_ROWS : HAS_DOT(kind) ? DOT_ROWS : WIDE_ROWS;
  const int64_t steps = num_steps(a->weight), passes = (end - first + most - 1) / most;
  const char *weight = panel_at(a->weight, panel);
  const int step_lines = (int)((panel_bytes(a->weight) / steps + 63) / 64);
  Sums sums __attribute__((aligned(64)));
  for (int64_t pass = 0, t = first; pass < passes; pass++) {
    int num_rows = (int)(first + (end - first) * (pass + 1) / passes - t);
    if (kind >= GROUPS4) num_rows = end - t < most ? (int)(end - t) : most;
    const Fetch fetch = fetch_of(weight, next, steps, step_lines, pass, passes);
    /* Of groups, t is a multiple of the rows beside each other. */
    const int64_t stride = kind >= GROUPS4 ? row_bytes(a->weight) : a->x_stride;
    multiply_vectors(&sums, num_rows, a->x + t * stride, stride, weight, steps, a->weight->span, fetch, kind);
    finish(&sums, a, t, num_rows, panel, kind);
    t += num_rows;
  }
}

int64_t rows_of_block(const Weight *weight) {
  const int64_t block = BLOCK_BYTES / row_bytes(weight) / ROWS * ROWS;
  return block < ROWS ? ROWS : block;
}

INLINE void multiply(const Product *a, Team *team, int kind) {
  const int64_t panels = num_panels(a->weight), block = rows_of_block(a->weight);
  const int num_tasks = (int)(panels * ((a->T + block - 1) / block));
  const char *after = a->after ? panel_at(a->after, share_begin(team, num_panels(a->after))) : NULL;
  int configured = 0, task;
  while ((task = next_task(team, num_tasks)) >= 0) {
    const int64_t first = task / panels * block, end = first + block < a->T ? first + block : a->T;
    const int64_t panel = task % panels;
    const char *next = task + 1 < share_end(team, num_tasks) ? panel_at(a->weight, (panel + 1) % panels) : after;
#if HAS_TILES
    if (a->use_tiles && kind < GROUPS4) {
      multiply_panel_tiles(a, first, end, panel, next, &configured, kind);
      continue;
    }
#endif
    multiply_panel(a, first, end, panel, next, kind);
  }
  (void)configured;
#if HAS_TILES
  if (a->use_tiles && kind < GROUPS4) _tile_release();
#endif
}

void product_part(const Product *a, Team *team) {
  switch ((Kind)a->weight->kind) {
    case BF16: multiply(a, team, BF16); break;
    case INT8: multiply(a, team, INT8); break;
    case GROUPS4: multiply(a, team, GROUPS4); break;
    case GROUPS8: multiply(a, team, GROUPS8); break;
    case UNITS4: multiply(a, team, UNITS4); break;
    case SPANS4: multiply(a, team, SPANS4); break;
    case SPANS8: multiply(a, team, SPANS8); break;
  }
}

/* The product of one block. */
INLINE Product product_of(const GroupedProduct *g, const ExpertBlock *block, int kind) {
  Product a = g->product;
  a.weight = g->weights + block->expert;
  a.x += block->first * (kind >= GROUPS4 ? row_bytes(a.weight) : a.x_stride);
  a.x_scales += block->first;
  a.out += block->first * a.out_stride;
  a.T = block->count;
  return a;
}

/* The panel of the item after `item` in the thread's own run; past its end, where its next run begins. */
INLINE const char *panel_after(const GroupedProduct *g, const Team *team, int64_t item, int64_t items, int64_t panels,
                               int num_tasks) {
  const int64_t next = item + 1;
  if (next < items * share_end(team, num_tasks) / num_tasks)
    return panel_at(g->weights + g->blocks[next / panels].expert, next % panels);
  if (!g->after) return NULL;
  const int64_t panels_after = num_panels(g->after);
  const int64_t first = share_begin(team, *g->num_blocks * panels_after);
  return panel_at(g->after + g->blocks[first / panels_after].expert, first % panels_after);
}

/* The number of tasks depends on the number of rows alone: a late thread must count the tasks of its phase as the others
   did, and the blocks may already be those of another layer. So panels of blocks are spread over as many tasks as there
   could be; a task has one of them or none. Blocks are read while a task is held. */
INLINE void multiply_grouped(const GroupedProduct *g, Team *team, int kind) {
  const int64_t panels = num_panels(g->weights);
  const int num_tasks = (int)(panels * g->max_blocks);
  int configured = 0, task;
  while ((task = next_task(team, num_tasks)) >= 0) {
    const int64_t items = *g->num_blocks * panels, item = items * task / num_tasks;
    if (item == items * (task + 1) / num_tasks) continue;
    const Product a = product_of(g, g->blocks + item / panels, kind);
    const char *next = panel_after(g, team, item, items, panels, num_tasks);
#if HAS_TILES
    if (a.use_tiles && kind < GROUPS4) {
      multiply_panel_tiles(&a, 0, a.T, item % panels, next, &configured, kind);
      continue;
    }
#endif
    multiply_panel(&a, 0, a.T, item % panels, next, kind);
  }
  (void)configured;
#if HAS_TILES
  if (g->product.use_tiles && kind < GROUPS4) _tile_release();
#endif
}

void grouped_product_part(const GroupedProduct *a, Team *team) {
  switch ((Kind)a->weights->kind) {
    case BF16: multiply_grouped(a, team, BF16); break;
    case INT8: multiply_grouped(a, team, INT8); break;
    case GROUPS4: multiply_grouped(a, team, GROUPS4); break;
    case GROUPS8: multiply_grouped(a, team, GROUPS8); break;
    case UNITS4: multiply_grouped(a, team, UNITS4); break;
    case SPANS4: multiply_grouped(a, team, SPANS4); break;
    case SPANS8: multiply_grouped(a, team, SPANS8); break;
  }
}

/* A row that is not finite stays so: its scale carries it into the product. */
INLINE void quantize_whole(const void *x, int8_t *out, float *scale, int64_t K) {
  f32x16 most = splat(0);
  for (int64_t k = 0; k < K; k += LANES) {
    const f32x16 size = (f32x16)((u32x16)load16(x, k, BFLOAT16) & 0x7fffffffu);
    most = select16(above16(size, most) | is_nan16(size), size, most);
  }
  const float largest = max16(most), factor = largest > 0 && largest < INFINITY ? 127.0f / largest : 0;
  *scale = largest / 127.0f;
  const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  for (int64_t k = 0; k < K; k += LANES) {
    const i32x16 whole = (i32x16)(load16(x, k, BFLOAT16) * factor + magic) - 0x4b400000;
    *(i8x16 *)(out + k) = __builtin_convertvector(whole, i8x16);
  }
}

void quantize_row(const Weight *weight, const void *row, char *x, int64_t x_stride, float *scales, int64_t t) {
  if (weight->kind == INT8)
    quantize_whole(row, (int8_t *)x + t * x_stride, scales + t, weight->K);
  else
    quantize_groups(row, weight->order, x, t, weight->K);
}

void shrink_row(const Adapters *a, const void *x, int64_t t) {
  const Adapter *adapter = adapter_of(a, t);
  if (!adapter) return;
  for (int64_t r = 0; r < adapter->R; r += SHRUNK_AT_ONCE)
    shrink(adapter->down + r * adapter->K, x, adapter->K, a->shrunk + t * a->stride + r);
}

/* weight: [N, W] words of four bytes; out: as in parts.h, zeros where N and W are padded. */
EXPORT void sluice_pack(const uint32_t *weight, uint32_t *out, int64_t N, int64_t W) {
  const int64_t steps = (W + STEP - 1) / STEP, panels = (N + PANEL - 1) / PANEL;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; p++)
    for (int64_t s = 0; s < steps; s++)
      for (int c = 0; c < PANEL; c++) {
        const int64_t n = p * PANEL + c;
        uint32_t *column = out + ((p * steps + s) * 2 + c / 16) * 256 + c % 16;
        for (int u = 0; u < STEP; u++) column[u * 16] = n < N && s * STEP + u < W ? weight[n * W + s * STEP + u] : 0;
      }
}

/* x as it is: the compiler would fuse a product of it with a sum, and round once where grouped.py rounds twice. */
INLINE float unfused(float x) {
  __asm__ volatile("" : "+m"(x));
  return x;
}

INLINE float half_at(const char *from, int64_t index) {
  uint16_t bits;
  memcpy(&bits, from + index * 2, 2);
  return as_float((uint32_t)(bits & 0x8000) << 16 | (uint32_t)(bits & 0x7fff) << 13) * 0x1p112f;
}

/* Scale of a group's column, and what a code of 0 stands for. */
typedef struct {
  float scale, minimum;
} ColumnStep;

INLINE ColumnStep column_step(const Weight *w, const char *panel, int64_t g, int column) {
  const int kind = (int)w->kind;
  const int64_t groups = w->K / GROUP;
  const char *shared = panel + groups * group_bytes(kind);
  const char *scales = panel + g * group_bytes(kind) + code_bytes(kind);
  if (has_spans(kind)) {
    const int64_t at = g / w->span * PANEL + column;
    return (ColumnStep){((const float *)shared)[at], ((const int8_t *)(shared + groups / w->span * PANEL * 4))[at]};
  }
  if (kind == UNITS4) {
    const char *unit = shared + g / UNIT_GROUPS * UNIT_BYTES;
    const uint8_t *bytes = (const uint8_t *)scales;
    return (ColumnStep){bytes[column] * half_at(unit, column), bytes[PANEL + column] * half_at(unit, PANEL + column)};
  }
  return (ColumnStep){half_at(scales, column), kind == GROUPS8 ? 0 : half_at(scales, PANEL + column)};
}

/* 32 elements of a row, of group g. */
INLINE void group_row(const Weight *w, const char *panel, int64_t g, int column, uint16_t *out) {
  const int kind = (int)w->kind, num_codes = has_bytes(kind) ? 4 : 8;
  const ColumnStep step = column_step(w, panel, g, column);
  const float scale = unfused(step.scale), minimum = unfused(step.minimum);
  for (int u = 0; u < num_words(kind); u++) {
    uint32_t word;
    memcpy(&word, panel + g * group_bytes(kind) + (u * PANEL + column) * 4, 4);
    for (int i = 0; i < num_codes; i++) {
      const uint32_t bits = num_codes == 4 ? word >> 8 * i : word >> (i % 4 * 8 + i / 4 * 4) & 15;
      const float code = num_codes == 4 ? (float)(int8_t)bits : (float)bits;
      const float y = has_spans(kind) ? scale * (code - minimum) : unfused(scale * code) + minimum;
      store1(out, u * num_codes + i, y, BFLOAT16);
    }
  }
}

void weight_row(const Weight *w, int64_t n, uint16_t *out) {
  const char *panel = panel_at(w, n / PANEL);
  const int column = (int)(n % PANEL);
  if (w->kind >= GROUPS4) {
    for (int64_t g = 0; g < w->K / GROUP; g++) {
      uint16_t group[GROUP];
      group_row(w, panel, g, column, group);
      for (int i = 0; i < GROUP; i++) out[w->order ? w->order[g * GROUP + i] : g * GROUP + i] = group[i];
    }
    return;
  }
  const int in_word = w->kind == INT8 ? 4 : 2;
  for (int64_t word = 0; word * in_word < w->K; word++) {
    const char *from = panel + ((word / STEP * 2 + column / LANES) * STEP * LANES + word % STEP * LANES + column % LANES) * 4;
    if (w->kind == BF16)
      memcpy(out + word * 2, from, 4);
    else
      for (int i = 0; i < 4; i++) store1(out, word * 4 + i, (float)((const int8_t *)from)[i] * w->scales[n], BFLOAT16);
  }
}

#define PARALLEL_ROWS 16

/* Rows `ids` [T] of a weight, to out [T, K] bfloat16, rows out_stride elements apart. */
EXPORT void sluice_rows(const Weight *weight, const int64_t *ids, uint16_t *out, int64_t out_stride, int64_t T) {
#pragma omp parallel for if (T >= PARALLEL_ROWS)
  for (int64_t t = 0; t < T; t++) weight_row(weight, ids[t], out + t * out_stride);
}

/* Whether these products were measured to be fast on such a processor. */
EXPORT void sluice_multiplies_bfloat16(int32_t *answer) {
#if defined(__AVX2__) && defined(__FMA__)
  *answer = 1;
#else
  *answer = 0;
#endif
}

/* Bytes of a row of x for the product with this weight, unless it is read as it is. */
EXPORT void sluice_row_bytes(const Weight *weight, int64_t *answer) { *answer = row_bytes(weight); }

/* x: [T, K] bfloat16, rows x_stride bytes apart; weight, out, epilogue: as in parts.h; bytes, scales: room for T rows
   of sluice_row_bytes, a multiple of 8, and for T scales, unless the weight is bfloat16; adapters: see parts.h. */
EXPORT void sluice_product(const void *x, int64_t x_stride, const Weight *weight, void *out, int64_t out_stride,
                           int64_t T, int epilogue, int use_tiles, void *bytes, float *scales,
                           const Adapters *adapters) {
  Product a = {x, x_stride, scales, weight, out, out_stride, T, epilogue, use_tiles, NULL, *adapters};
  for (int64_t t = 0; t < T; t++) shrink_row(adapters, a.x + t * x_stride, t);
  if (weight->kind != BF16) {
    const int64_t stride = row_bytes(weight);
    for (int64_t t = 0; t < T; t++)
      quantize_row(weight, a.x + t * x_stride, bytes, stride, scales, t);
    a.x = bytes;
    a.x_stride = stride;
  }
  RUN_PARTS(weight->N * weight->K >= PARALLEL_ELEMENTS, product_part(&a, &team));
}
