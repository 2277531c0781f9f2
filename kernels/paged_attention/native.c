/* Attention with float32 elements, and what Python calls for both types. */
#include "attend.h"

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

void attention_part(const Attention *a, Team *team, int dtype) {
  if (dtype == BFLOAT16)
    attend_bfloat16(a, team);
  else
    attend(a, team, FLOAT32);
}

/* Request AMX tile registers from the kernel, which a process must do before using them; `allowed` becomes the
   answer. */
EXPORT void sluice_allow_tiles(int32_t *allowed) {
#if HAS_TILES
  const long request_permission = 0x1023, tile_data = 18;
  *allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  *allowed = 0;
#endif
}

/* query: [T, H, D], strides in elements; keys, values: the packed cache of layout.py, P slots per block and DP elements
   per head after padding; block_tables: [S, table_stride]; query_start_locs: [S + 1]; context_lens: [S]; out: [T, H,
   D]; use_tiles: result of sluice_allow_tiles; soft_cap: 0 for none; sinks: [H], or null; key_scales,
   value_scales: [blocks, G, P] of a cache in int8, or null. */
EXPORT void sluice_paged_attention(int dtype, const void *query, int64_t query_stride_token, int64_t query_stride_head,
                                   const void *keys, const void *values, const int32_t *block_tables,
                                   int64_t table_stride, const int32_t *query_start_locs, const int32_t *context_lens,
                                   void *out, int S, int T, int H, int G, int D, int block_size, int P, int DP,
                                   int window, int use_tiles, float scale, float soft_cap, const float *sinks,
                                   const float *key_scales, const float *value_scales) {
  const Attention a = {query, query_stride_token, query_stride_head, keys, values, block_tables, table_stride,
                       query_start_locs, context_lens, out, (int64_t)H * D, S, T, H, G, D, block_size, P, DP, window,
                       use_tiles, scale, soft_cap, sinks, key_scales, value_scales};
  RUN_PARTS(query_start_locs[S] > 1 || G > 1, attention_part(&a, &team, dtype));
}
