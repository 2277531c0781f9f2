/* AMX: eight registers of up to 16 rows of 64 bytes, which a process must request and a thread must configure. */
#ifndef SLUICE_TILES_H
#define SLUICE_TILES_H

#include "native.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

#if HAS_TILES
/* The compiler assumes that the instruction reads eight bytes, and might not write the others before it. */
INLINE void load_tile_config(const TileConfig *config) {
  __asm__ volatile("" : : "r"(config) : "memory");
  _tile_loadconfig(config);
}
#endif

#endif
