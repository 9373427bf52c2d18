// The configuration of AMX tiles.
#pragma once

#if defined(OCTAVO_AMX)

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTileRows = 16;

struct alignas(64) TileConfig {  // Intel's manual, volume 1, 18.2
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

OCTAVO_INLINE void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));  // the compiler's own tells it of the first 8 bytes only
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
