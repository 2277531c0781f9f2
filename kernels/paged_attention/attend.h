/* Attention over the packed cache, blocks read in place, for prefill chunks and decodes.

   Rows are (token, head) pairs of the heads that share a key-value head, token by token. A task is up to ROWS of them
   for one sequence and key-value head. It walks the sequence's keys in segments of 16 token slots, CHUNK segments at a
   time: scores, online softmax (Milakov & Gimelshein, 2018), values. Four bytes of a query (two bfloat16, or a float)
   meet 64 bytes of keys (16 tokens) in one instruction; the same holds for weights and values.

   The contents of a slot that no row may see never enter a sum: its score is replaced, its value is not read.

   A cache in int8 is widened to bfloat16, which holds its codes exactly, chunk by chunk. A key's scale multiplies its
   scores, a value's its weights.

   Each element type is a unit of its own, which halves the time of the compiler: native.c and native_bfloat16.c. */
#ifndef SLUICE_ATTEND_H
#define SLUICE_ATTEND_H

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__) && !defined(__AMX_BF16__)
#pragma GCC optimize("O3") /* sums of rows stay in registers only if all loops over them are unrolled */
#endif
#include "../parts.h"
#include "../tiles.h"

#define ROWS 16
#define CHUNK 8
#define MAX_DP 256
#if defined(__AVX512BW__) /* sums that stay in registers */
#define FUSED_ROWS 4
#define FUSED_SEGMENTS 2
#define FUSED_LANES 64
#else
#define FUSED_ROWS 3
#define FUSED_SEGMENTS 1
#define FUSED_LANES 32
#endif
#define PIECES_AHEAD 4     /* of tiles */
#define FAR_PIECES_AHEAD 8 /* of vectors */

/* Sixteen token slots of one block: slots `low` to `high` (exclusive) are seen by some row. */
typedef struct {
  const char *keys, *values;
  const float *key_scales, *value_scales; /* of the slots of a cache in int8, or null */
  int first_position;                     /* of slot 0 */
  int low, high;
} Segment;

/* Up to CHUNK segments that are processed together. */
typedef struct {
  Segment segments[CHUNK];
  int count, end_position;
} Chunk;

/* The current chunk and the next data. A piece is the keys or the values of one segment; a chunk's keys are used first,
   then its values. */
typedef struct {
  const Chunk *chunk, *after;
  int64_t piece_bytes;
} Stream;

/* Whether one instruction adds the products of two bfloat16 in each lane. */
#if defined(__AVX512BF16__)
#define HAS_PAIR_DOT 1
#else
#define HAS_PAIR_DOT 0
#endif

/* Numbers that a word of the cache counts as in sums: two floats where bfloat16 must be widened. Queries and weights
   are then kept as floats. */
#define NUM_PARTS(dtype) ((dtype) == BFLOAT16 && !HAS_PAIR_DOT ? 2 : 1)

/* State of one task: R rows, their queries, their running maximum and sum, their weighted values. */
typedef struct {
  uint32_t query[ROWS * MAX_DP];
  float out[ROWS * MAX_DP];
  f32x16 scores[ROWS][CHUNK];
  uint32_t weights[ROWS][CHUNK * LANES];
  float maximum[ROWS], sum[ROWS]; /* maximum: of stored scores, see unit_of */
  int position[ROWS];
} Tile;

/* One part of each word of the cache. */
INLINE words part_of(words x, int part, int dtype) {
  if (NUM_PARTS(dtype) == 1) return x;
  return part ? (words)high_float(x) : (words)low_float(x);
}

/* acc += x * y: `x` from the cache, `y` the same for every lane. */
INLINE void multiply_add(floats *acc, words x, words y, int dtype) {
#if HAS_PAIR_DOT
  if (dtype == BFLOAT16) {
    *acc = (floats)_mm512_dpbf16_ps((__m512)*acc, (__m512bh)x, (__m512bh)y);
    return;
  }
#endif
  (void)dtype;
  add_product(acc, (floats)x, (floats)y);
}

#define SEGMENT_VECTORS (LANES / WIDTH)

/* Scores of `num_rows` rows against `num_columns` segments, whose keys are `keys`; `steps` times four bytes per row. */
INLINE void score_rows(Tile *tile, int first_row, int num_rows, int column, int num_columns, const char *const *keys,
                       int steps, int dtype) {
  const int count = num_columns * SEGMENT_VECTORS, num_parts = NUM_PARTS(dtype), width = steps * num_parts;
  floats sums[2][FUSED_ROWS][FUSED_SEGMENTS * SEGMENT_VECTORS]; /* of even and odd steps */
  const uint32_t *query = tile->query + first_row * width;
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < count; v++) sums[0][r][v] = sums[1][r][v] = (floats){0};
  for (int i = 0; i < steps; i += 2)
    for (int part = 0; part < num_parts; part++)
      for (int odd = 0; odd < 2; odd++) {
        words y[FUSED_ROWS];
        for (int r = 0; r < num_rows; r++) y[r] = broadcast(query + r * width + (i + odd) * num_parts + part);
        for (int v = 0; v < count; v++) {
          const char *from = again(keys[v / SEGMENT_VECTORS] + (i + odd) * 64);
          const words x = part_of(((const words *)from)[v % SEGMENT_VECTORS], part, dtype);
          for (int r = 0; r < num_rows; r++) multiply_add(&sums[odd][r][v], x, y[r], dtype);
        }
      }
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < count; v++)
      *((floats *)&tile->scores[first_row + r][column] + v) = sums[0][r][v] + sums[1][r][v];
}

/* Add a segment's values, weighted, to `num_vectors` registers of elements of `num_rows` rows. Slots outside
   [low, high) are not used. */
INLINE void weigh_rows(floats acc[FUSED_ROWS][FUSED_LANES / WIDTH], const Tile *tile, int first_row, int num_rows,
                       int num_vectors, int column, const Segment *segment, int64_t row_bytes, int64_t offset,
                       int dtype) {
  const int tokens = dtype == BFLOAT16 ? 2 : 1; /* in units of four bytes */
  const int num_parts = NUM_PARTS(dtype);
  for (int i = segment->low / tokens; i * tokens < segment->high; i++) {
    const char *row = segment->values + i * row_bytes + offset;
    words copy[FUSED_LANES / WIDTH];
    if (dtype == BFLOAT16 && (i * 2 < segment->low || i * 2 + 1 >= segment->high)) {
      const uint32_t seen = i * 2 < segment->low ? 0xffff0000u : 0x0000ffffu;
      for (int v = 0; v < num_vectors; v++) copy[v] = *(const words *)(row + v * WIDTH * 4) & seen;
      row = (const char *)copy;
    }
    for (int part = 0; part < num_parts; part++) {
      words y[FUSED_ROWS];
      row = again(row);
      for (int r = 0; r < num_rows; r++)
        y[r] = broadcast(&tile->weights[first_row + r][(column * LANES / tokens + i) * num_parts + part]);
      for (int v = 0; v < num_vectors; v++) {
        const words x = part_of(*(const words *)(row + v * WIDTH * 4), part, dtype);
        for (int r = 0; r < num_rows; r++) multiply_add(&acc[r][v], x, y[r], dtype);
      }
    }
  }
}

/* out += weights * values, over the chunk, for `num_vectors` registers of elements of `num_rows` rows, from `d` on. */
INLINE void weigh_lanes(Tile *tile, int first_row, int num_rows, int num_vectors, int d, const Segment *segments,
                        int num_segments, int DP, int dtype) {
  floats acc[FUSED_ROWS][FUSED_LANES / WIDTH];
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < num_vectors; v++) acc[r][v] = *(floats *)(tile->out + (first_row + r) * DP + d + v * WIDTH);
  for (int c = 0; c < num_segments; c++)
    weigh_rows(acc, tile, first_row, num_rows, num_vectors, c, segments + c, (int64_t)DP * 4, d * 4, dtype);
  for (int r = 0; r < num_rows; r++)
    for (int v = 0; v < num_vectors; v++) *(floats *)(tile->out + (first_row + r) * DP + d + v * WIDTH) = acc[r][v];
}

INLINE void weigh_chunk(Tile *tile, int first_row, int num_rows, const Segment *segments, int num_segments, int DP,
                        int dtype) {
  int d = 0;
  for (; d + FUSED_LANES <= DP; d += FUSED_LANES)
    weigh_lanes(tile, first_row, num_rows, FUSED_LANES / WIDTH, d, segments, num_segments, DP, dtype);
  for (; d < DP; d += LANES)
    weigh_lanes(tile, first_row, num_rows, LANES / WIDTH, d, segments, num_segments, DP, dtype);
}

/* Mask the scores of a segment that a row must not see. */
INLINE void mask_scores(Tile *tile, int num_rows, int column, const Segment *segment, int window) {
  const int all_new = segment->first_position + LANES - 1 <= tile->position[0];
  const int none_old = !window || segment->first_position > tile->position[num_rows - 1] - window;
  if (all_new && none_old && segment->low == 0 && segment->high == LANES) return;
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int r = 0; r < num_rows; r++) {
    const int last = tile->position[r] - segment->first_position, end = last < segment->high ? last + 1 : segment->high;
    const int oldest = window ? last - window + 1 : 0, first = oldest > segment->low ? oldest : segment->low;
    /* The sign of a difference: see COMPARISON. */
    const i32x16 seen = ~((lanes - first) >> 31) & ((lanes - end) >> 31);
    tile->scores[r][column] = select16(seen, tile->scores[r][column], splat(-INFINITY));
  }
}

/* Unit of a stored score, in log2 units: with a soft cap scores are stored as fractions of it, between -1 and 1; others
   are unscaled. */
INLINE float unit_of(const Attention *a) { return (a->soft_cap > 0 ? a->soft_cap : a->scale) * LOG2_E; }

/* Apply the soft cap to a chunk's scores. */
INLINE void cap_scores(Tile *tile, int num_rows, int num_segments, const Attention *a) {
  const float factor = a->scale / a->soft_cap;
  for (int r = 0; r < num_rows; r++)
    for (int c = 0; c < num_segments; c++) tile->scores[r][c] = tanh16(tile->scores[r][c] * factor);
}

/* Multiply scores by the scales of their keys. */
INLINE void scale_scores(Tile *tile, int num_rows, int num_segments, const Segment *segments) {
  for (int c = 0; c < num_segments; c++) {
    const f32x16 scales = *(const f32x16 *)segments[c].key_scales;
    for (int r = 0; r < num_rows; r++) tile->scores[r][c] *= scales;
  }
}

/* Store a register of weights, of slots from `slot` of the chunk on, rounded to the element type. */
INLINE void store_weights(Tile *tile, int r, int slot, floats weights, int dtype) {
#if HAS_PAIR_DOT
  if (dtype == BFLOAT16) {
    *(u16x16 *)((uint16_t *)tile->weights[r] + slot) = to_bf16x16((f32x16)weights);
    return;
  }
#endif
  *(floats *)(tile->weights[r] + slot) = dtype == BFLOAT16 ? rounded_to_bf16(weights) : weights;
}

/* One row's online softmax over the chunk: scores become weights, earlier sums are rescaled. `scale`: see unit_of. */
INLINE void soften_row(Tile *tile, int r, const Segment *segments, int num_segments, int DP, float scale, int dtype) {
  const floats *scores = (const floats *)tile->scores[r];
  floats best[SEGMENT_VECTORS], sums[SEGMENT_VECTORS];
  for (int v = 0; v < SEGMENT_VECTORS; v++) best[v] = scores[v], sums[v] = (floats){0};
  /* The maximum may lose a NaN; its weight will be NaN again. */
  for (int c = 1; c < num_segments; c++)
    for (int v = 0; v < SEGMENT_VECTORS; v++) best[v] = larger(best[v], scores[c * SEGMENT_VECTORS + v]);
  const float before = tile->maximum[r], chunk_maximum = greatest16(*(const f32x16 *)best);
  const float maximum = chunk_maximum > before ? chunk_maximum : before;
  const float shift = maximum == -INFINITY ? 0.0f : maximum * scale;
  for (int c = 0; c < num_segments; c++)
    for (int v = 0; v < SEGMENT_VECTORS; v++) {
      const floats x = scores[c * SEGMENT_VECTORS + v];
      floats weight = zero_if_hidden(exp2_floats(x * scale - shift), x);
      sums[v] += weight;
      /* The scales of slots without a value are any number. */
      if (dtype == BFLOAT16 && segments[c].value_scales)
        weight = zero_if_hidden(weight * *(const floats *)(segments[c].value_scales + v * WIDTH), x);
      store_weights(tile, r, c * LANES + v * WIDTH, weight, dtype);
    }
  tile->maximum[r] = maximum;
  const float sum = sum16(*(const f32x16 *)sums);
  if (before == maximum || before == -INFINITY) {
    tile->sum[r] += sum;
    return;
  }
  const float before_scaled = before * scale, factor = exp2_floats((floats)broadcast(&before_scaled) - shift)[0];
  tile->sum[r] = tile->sum[r] * factor + sum;
  for (int d = 0; d < DP; d += WIDTH) *(floats *)(tile->out + r * DP + d) *= factor;
}

/* Rows of the next pass of a task with `left` more: about as many in each pass. */
INLINE int rows_of_pass(int left) {
  const int passes = (left + FUSED_ROWS - 1) / FUSED_ROWS;
  return (left + passes - 1) / passes;
}

INLINE void score_segments(Tile *tile, int num_rows, int column, int num_columns, const char *const *keys, int steps,
                           int dtype) {
#define CASE(n) \
  case n: if (n <= FUSED_ROWS) score_rows(tile, r, n, column, num_columns, keys, steps, dtype); break;
  for (int r = 0, count; r < num_rows; r += count) switch (count = rows_of_pass(num_rows - r)) {
      CASE(1) CASE(2) CASE(3) CASE(4)
    }
#undef CASE
}

/* The piece `ahead` pieces after this one; null if unknown. */
INLINE const char *piece_after(const Stream *stream, int piece, int ahead) {
  const Chunk *chunk = stream->chunk;
  piece += ahead;
  if (piece >= 2 * chunk->count) {
    piece -= 2 * chunk->count;
    chunk = stream->after;
    if (piece >= 2 * chunk->count) return NULL;
  }
  return piece < chunk->count ? chunk->segments[piece].keys : chunk->segments[piece - chunk->count].values;
}

INLINE void fetch_after(const Stream *stream, int piece) {
  const char *from = piece_after(stream, piece, PIECES_AHEAD);
  if (!from) return;
  for (int64_t i = 0; i < stream->piece_bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

/* Into the second-level cache: see kernels/linear. */
INLINE void fetch_far_after(const Stream *stream, int piece) {
  const char *from = piece_after(stream, piece, FAR_PIECES_AHEAD);
  if (!from) return;
  for (int64_t i = 0; i < stream->piece_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

INLINE void score_chunk(Tile *tile, int num_rows, const Segment *segments, const Stream *stream, int steps, int dtype) {
  const int count = stream->chunk->count;
  for (int c = 0; c < count; c += FUSED_SEGMENTS) {
    const int has_two = FUSED_SEGMENTS == 2 && c + 1 < count;
    const char *keys[2] = {segments[c].keys, segments[c + has_two].keys};
    fetch_far_after(stream, c);
    if (has_two) {
      fetch_far_after(stream, c + 1);
      score_segments(tile, num_rows, c, FUSED_SEGMENTS, keys, steps, dtype);
    } else {
      score_segments(tile, num_rows, c, 1, keys, steps, dtype);
    }
  }
}

INLINE void weigh_all(Tile *tile, int num_rows, const Segment *segments, int num_segments, int DP, int dtype) {
#define CASE(n) \
  case n: if (n <= FUSED_ROWS) weigh_chunk(tile, r, n, segments, num_segments, DP, dtype); break;
  for (int r = 0, count; r < num_rows; r += count) switch (count = rows_of_pass(num_rows - r)) {
      CASE(1) CASE(2) CASE(3) CASE(4)
    }
#undef CASE
}

#if HAS_TILES
/* Tile registers: 0 to 3 sums (rows x 16 floats); 4 queries (rows x 32), 5 keys (16 pairs x 16); 6 weights (rows x 16),
   7 values (8 pairs x 16). */
INLINE void configure_tiles(int num_rows) {
  TileConfig config = {.palette = 1};
  for (int t = 0; t < 5; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = (uint8_t)num_rows;
  }
  config.row_bytes[5] = 64, config.rows[5] = 16;
  config.row_bytes[6] = 32, config.rows[6] = (uint8_t)num_rows;
  config.row_bytes[7] = 64, config.rows[7] = 8;
  load_tile_config(&config);
}

/* Scores of all rows with tiles: 16 slots per segment, 32 elements of a head at a time. */
INLINE void score_chunk_tiles(Tile *tile, const Segment *segments, const Stream *stream, int DP) {
  const int num_segments = stream->chunk->count;
  for (int c = 0; c < num_segments; c += 2) {
    fetch_after(stream, c);
    if (c + 1 < num_segments) fetch_after(stream, c + 1);
    const Segment *a = segments + c, *b = segments + (c + 1 < num_segments ? c + 1 : c);
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < DP; d += 32) {
      _tile_loadd(4, (const char *)tile->query + d * 2, DP * 2);
      _tile_loadd(5, a->keys + d * 32, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, b->keys + d * 32, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    _tile_stored(0, &tile->scores[0][c], sizeof tile->scores[0]);
    if (c + 1 < num_segments) _tile_stored(1, &tile->scores[0][c + 1], sizeof tile->scores[0]);
  }
}

/* A copy of a segment's values, zero in slots that no row may see: [8, DP, 2]. */
INLINE const char *seen_values(const Segment *segment, uint32_t *copy, int DP) {
  for (int i = 0; i < LANES / 2; i++) {
    uint32_t seen = 0;
    if (i * 2 >= segment->low && i * 2 < segment->high) seen |= 0x0000ffffu;
    if (i * 2 + 1 >= segment->low && i * 2 + 1 < segment->high) seen |= 0xffff0000u;
    for (int d = 0; d < DP; d += LANES)
      *(u32x16 *)(copy + i * DP + d) = *(const u32x16 *)(segment->values + ((int64_t)i * DP + d) * 4) & seen;
  }
  return (const char *)copy;
}

/* out += weights * values for all rows with tiles: 64 elements of a head at a time, or the remainder. */
INLINE void weigh_chunk_tiles(Tile *tile, const char *const *values, const Stream *stream, int DP) {
  const int num_segments = stream->chunk->count;
  const int64_t stride = (int64_t)DP * 4;
  for (int d = 0; d < DP; d += 64) {
    float *out = tile->out + d;
    const int num_vectors = (DP - d) / LANES;
    _tile_loadd(0, out, stride);
    if (num_vectors > 1) _tile_loadd(1, out + 16, stride);
    if (num_vectors > 2) _tile_loadd(2, out + 32, stride);
    if (num_vectors > 3) _tile_loadd(3, out + 48, stride);
    for (int c = 0; c < num_segments; c++) {
      const char *row = values[c] + d * 4;
      if (d == 0) fetch_after(stream, num_segments + c);
      _tile_loadd(6, (const char *)tile->weights + c * 32, sizeof tile->weights[0]);
      _tile_loadd(7, row, stride);
      _tile_dpbf16ps(0, 6, 7);
      if (num_vectors > 1) {
        _tile_loadd(7, row + 64, stride);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (num_vectors > 2) {
        _tile_loadd(7, row + 128, stride);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (num_vectors > 3) {
        _tile_loadd(7, row + 192, stride);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, out, stride);
    if (num_vectors > 1) _tile_stored(1, out + 16, stride);
    if (num_vectors > 2) _tile_stored(2, out + 32, stride);
    if (num_vectors > 3) _tile_stored(3, out + 48, stride);
  }
}
#endif

/* Codes of sixteen slots as bfloat16. */
INLINE void widen(uint32_t *out, const char *codes, int DP) {
  for (int i = 0; i < LANES * DP; i += 2 * LANES) {
    uint16_t *to = (uint16_t *)out + i;
#if defined(__AVX512BF16__)
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i))));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i + LANES))));
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#elif defined(__AVX2__)
    for (int half = 0; half < 2 * LANES; half += LANES) {
      __m256i bits[2];
      for (int j = 0; j < 2; j++) {
        const __m128i eight = _mm_loadl_epi64((const __m128i *)(codes + i + half + 8 * j));
        bits[j] = _mm256_srli_epi32((__m256i)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), 16);
      }
      /* The halves are packed within halves of a register. */
      const __m256i packed = _mm256_packus_epi32(bits[0], bits[1]);
      _mm256_storeu_si256((__m256i *)(to + half), _mm256_permute4x64_epi64(packed, 0xd8));
    }
#else
    for (int half = 0; half < 2 * LANES; half += LANES) {
      const f32x16 wide = __builtin_convertvector(*(const i8x16 *)(codes + i + half), f32x16);
      *(u16x16 *)(to + half) = __builtin_convertvector((u32x16)wide >> 16, u16x16);
    }
#endif
  }
}

/* The keys or the values of a chunk in bfloat16. */
typedef struct {
  Segment segments[CHUNK];
  uint32_t words[CHUNK][LANES / 2 * MAX_DP];
} WideChunk;

INLINE const Segment *widened(WideChunk *wide, const Chunk *chunk, int are_values, int DP) {
  for (int c = 0; c < chunk->count; c++) {
    wide->segments[c] = chunk->segments[c];
    widen(wide->words[c], are_values ? chunk->segments[c].values : chunk->segments[c].keys, DP);
    wide->segments[c].keys = wide->segments[c].values = (const char *)wide->words[c];
  }
  return wide->segments;
}

/* One chunk for all rows of the tile, while the next data is prefetched. */
INLINE void attend_chunk(Tile *tile, int num_rows, const Chunk *chunk, const Chunk *after, const Attention *a,
                         int by_tiles, int dtype) {
  const int num_segments = chunk->count, is_narrow = dtype == BFLOAT16 && a->key_scales != NULL;
  const Stream stream = {chunk, after, LANES * a->DP * (is_narrow ? 1 : dtype == BFLOAT16 ? 2 : 4)};
  WideChunk wide;
  const Segment *segments = is_narrow ? widened(&wide, chunk, 0, a->DP) : chunk->segments;
#if HAS_TILES
  if (by_tiles)
    score_chunk_tiles(tile, segments, &stream, a->DP);
  else
#endif
    score_chunk(tile, num_rows, segments, &stream, a->DP / (dtype == BFLOAT16 ? 2 : 1), dtype);
  if (is_narrow) scale_scores(tile, num_rows, num_segments, segments);
  if (a->soft_cap > 0) cap_scores(tile, num_rows, num_segments, a);
  for (int c = 0; c < num_segments; c++) mask_scores(tile, num_rows, c, segments + c, a->window);
  for (int r = 0; r < num_rows; r++) soften_row(tile, r, segments, num_segments, a->DP, unit_of(a), dtype);
  if (is_narrow) segments = widened(&wide, chunk, 1, a->DP);
#if HAS_TILES
  if (by_tiles) {
    uint32_t copies[CHUNK][LANES / 2 * MAX_DP];
    const char *values[CHUNK];
    for (int c = 0; c < num_segments; c++) {
      const int is_whole = segments[c].low == 0 && segments[c].high == LANES;
      values[c] = is_whole ? segments[c].values : seen_values(segments + c, copies[c], a->DP);
    }
    weigh_chunk_tiles(tile, values, &stream, a->DP);
    return;
  }
#endif
  (void)by_tiles;
  for (int c = 0; c < num_segments; c++) fetch_far_after(&stream, num_segments + c);
  weigh_all(tile, num_rows, segments, num_segments, a->DP, dtype);
}

/* A row's query, as the tile keeps it; zeros from D on. */
INLINE void load_query(char *query, const char *from, int D, int DP, int dtype) {
  if (NUM_PARTS(dtype) == 2) {
    for (int d = 0; d < DP; d++) ((float *)query)[d] = d < D ? load1(from, d, dtype) : 0;
    return;
  }
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
  memcpy(query, from, D * size);
  memset(query + D * size, 0, (DP - D) * size);
}

INLINE void load_rows(Tile *tile, const Attention *a, int s, int g, int first_row, int num_rows, int dtype) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4, num_bytes = size * NUM_PARTS(dtype);
  const int group = a->H / a->G, start = a->query_start_locs[s];
  const int first_position = a->context_lens[s] - (a->query_start_locs[s + 1] - start);
  for (int r = 0; r < num_rows; r++) {
    const int token = (first_row + r) / group, head = g * group + (first_row + r) % group;
    const char *from = a->query + ((start + token) * a->query_stride_token + head * a->query_stride_head) * size;
    load_query((char *)tile->query + r * a->DP * num_bytes, from, a->D, a->DP, dtype);
    tile->position[r] = first_position + token;
    tile->maximum[r] = -INFINITY;
    tile->sum[r] = 0;
  }
  memset(tile->out, 0, sizeof(float) * num_rows * a->DP);
}

/* One over the sum of a row's weights, including its sink's; weights are relative to the largest score, `maximum` in
   log2 units. */
INLINE float factor_with_sink(float sum, float maximum, float sink) {
  const float log2_sink = sink * LOG2_E;
  if (log2_sink <= maximum) return 1.0f / (sum + exp2_16(splat(log2_sink - maximum))[0]);
  const float share = exp2_16(splat(maximum - log2_sink))[0];
  return share / (sum * share + 1.0f);
}

INLINE void store_rows(const Tile *tile, const Attention *a, int s, int g, int first_row, int num_rows, int dtype) {
  const int64_t size = dtype == BFLOAT16 ? 2 : 4;
  const int group = a->H / a->G, start = a->query_start_locs[s];
  for (int r = 0; r < num_rows; r++) {
    const int token = (first_row + r) / group, head = g * group + (first_row + r) % group;
    char *out = a->out + ((start + token) * a->out_stride_token + (int64_t)head * a->D) * size;
    float factor = 1.0f / tile->sum[r];
    if (a->sinks) factor = factor_with_sink(tile->sum[r], tile->maximum[r] * unit_of(a), a->sinks[head]);
    int d = 0;
    for (; d + LANES <= a->D; d += LANES) store16(out, d, *(const f32x16 *)(tile->out + r * a->DP + d) * factor, dtype);
    for (; d < a->D; d++) store1(out, d, tile->out[r * a->DP + d] * factor, dtype);
  }
}

/* Sequence s owns the tiles from here on: an upper bound of those before it that needs no prefix sum. */
INLINE int first_tile(const Attention *a, int s) {
  return (int)((int64_t)a->query_start_locs[s] * (a->H / a->G) / ROWS) + s;
}

INLINE int sequence_of(const Attention *a, int tile) {
  int low = 0, high = a->S - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(a, middle) <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* A task: rows from `first_row` of sequence s, key-value head g, and the positions that they see; none if num_rows is
   0. */
typedef struct {
  int s, g, first_row, num_rows, first, end;
} Task;

INLINE Task task_at(const Attention *a, int index) {
  const int tile = index / a->G, s = sequence_of(a, tile), group = a->H / a->G;
  const int num_new = a->query_start_locs[s + 1] - a->query_start_locs[s];
  const int first_row = (tile - first_tile(a, s)) * ROWS, left = num_new * group - first_row;
  if (left <= 0 || a->context_lens[s] == 0) return (Task){s, index % a->G, first_row, 0, 0, 0};
  const int num_rows = left < ROWS ? left : ROWS;
  const int first_position = a->context_lens[s] - num_new + first_row / group;
  const int end = a->context_lens[s] - num_new + (first_row + num_rows - 1) / group + 1;
  const int first = a->window && first_position >= a->window ? first_position - a->window + 1 : 0;
  return (Task){s, index % a->G, first_row, num_rows, first, end};
}

/* The chunk of a task that begins with the segment of `position`. Chunks end at the same positions for every row of a
   sequence, so that its bits do not depend on the other rows of its task. */
INLINE Chunk chunk_at(const Attention *a, const Task *t, int position, int dtype) {
  const int is_narrow = dtype == BFLOAT16 && a->key_scales != NULL;
  const int64_t size = is_narrow ? 1 : dtype == BFLOAT16 ? 2 : 4, slot_bytes = a->DP * size;
  const int32_t *table = a->block_tables + t->s * a->table_stride;
  int block = position / a->block_size, slot = position % a->block_size / LANES * LANES;
  Chunk chunk = {.count = 0};
  int left = CHUNK - (block * (a->P / LANES) + slot / LANES) % CHUNK;
  for (; left && block * a->block_size + slot < t->end; left--) {
    const int first_position = block * a->block_size + slot;
    const int slots = a->block_size - slot < LANES ? a->block_size - slot : LANES;
    const int64_t from = ((int64_t)table[block] * a->G + t->g) * a->P + slot, offset = from * slot_bytes;
    const int low = t->first > first_position ? t->first - first_position : 0;
    const int high = t->end < first_position + slots ? t->end - first_position : slots;
    chunk.segments[chunk.count++] = (Segment){a->keys + offset,
                                              a->values + offset,
                                              is_narrow ? a->key_scales + from : NULL,
                                              is_narrow ? a->value_scales + from : NULL,
                                              first_position,
                                              low,
                                              high};
    slot += LANES;
    if (slot >= a->block_size) block++, slot = 0;
  }
  chunk.end_position = block * a->block_size + slot;
  return chunk;
}

/* `next`: the following task; `configured`: the rows that the tiles are configured for. */
INLINE void attend_task(const Attention *a, const Task *t, const Task *next, int *configured, int dtype) {
  Tile tile;
  load_rows(&tile, a, t->s, t->g, t->first_row, t->num_rows, dtype);
  int by_tiles = 0;
#if HAS_TILES
  by_tiles = a->use_tiles && dtype == BFLOAT16 && a->DP % 32 == 0;
  if (by_tiles && *configured != t->num_rows) configure_tiles(*configured = t->num_rows);
#endif
  (void)configured;
  Chunk chunks[2];
  chunks[0] = chunk_at(a, t, t->first, dtype);
  for (int i = 0;; i ^= 1) {
    const Chunk *chunk = chunks + i;
    const int is_last = chunk->end_position >= t->end;
    chunks[i ^ 1] = is_last ? chunk_at(a, next, next->first, dtype) : chunk_at(a, t, chunk->end_position, dtype);
    attend_chunk(&tile, t->num_rows, chunk, chunks + (i ^ 1), a, by_tiles, dtype);
    if (is_last) break;
  }
  store_rows(&tile, a, t->s, t->g, t->first_row, t->num_rows, dtype);
}

/* Set rows of tokens first to end to zero. */
INLINE void clear(const Attention *a, int64_t first, int64_t end, int64_t size) {
  for (int64_t t = first; t < end; t++) memset(a->out + t * a->out_stride_token * size, 0, a->H * a->D * size);
}

/* Rows without a context, and those of no sequence. */
INLINE void clear_unused(const Attention *a, int64_t size) {
  for (int s = 0; s < a->S; s++)
    if (a->context_lens[s] == 0) clear(a, a->query_start_locs[s], a->query_start_locs[s + 1], size);
  clear(a, a->query_start_locs[a->S], a->T, size);
}

INLINE void attend(const Attention *a, Team *team, int dtype) {
  const int num_tokens = a->query_start_locs[a->S];
  const int last = a->S ? (int)((int64_t)num_tokens * (a->H / a->G) / ROWS + a->S) * a->G : 0; /* clears */
  const Task no_task = {0};
  int configured = 0;
  for (int index = next_task(team, last + 1); index >= 0;) {
    const int following = next_task(team, last + 1);
    const Task task = index < last ? task_at(a, index) : no_task;
    const Task next = following >= 0 && following < last ? task_at(a, following) : no_task;
    if (task.num_rows) attend_task(a, &task, &next, &configured, dtype);
    if (index == last) clear_unused(a, dtype == BFLOAT16 ? 2 : 4);
    index = following;
  }
#if HAS_TILES
  if (configured) _tile_release();
#endif
}

void attend_bfloat16(const Attention *a, Team *team);

#endif
