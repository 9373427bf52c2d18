// Products through AMX tiles, which have as many rows as an item has, up to 16: one row or 16, the sums of a row have one
// order. With up to 8 rows a product with half a tile takes half the time.
#pragma once

#include "amx.h"
#include "attention_softmax.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace OCTAVO_ISA {

// The compiler does not know that tiles are loaded from memory and stored to it.
OCTAVO_INLINE void order_memory() { asm volatile("" ::: "memory"); }

OCTAVO_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The first `count` tiles of sums, side by side in rows of `stride` bytes.
OCTAVO_INLINE void store_sums(float* to, int64_t stride, int count) {
  _tile_stored(0, to, stride);
  if (count > 1) _tile_stored(1, to + 16, stride);
  if (count > 2) _tile_stored(2, to + 32, stride);
  if (count > 3) _tile_stored(3, to + 48, stride);
}

// sums[sum] += rows[row] times the tile at `from`, loaded into `column`.
#define OCTAVO_ADD_PRODUCT(sum, row, column, from, stride) \
  do {                                                     \
    _tile_loadd(column, from, stride);                     \
    _tile_dpbf16ps(sum, row, column);                      \
  } while (false)

struct AmxEngine {
  using Number = bf16;
  using Element = bf16;

  // Tiles 0 to 3 hold sums; 4 and 5 are rows of 32 numbers and 16 pairs of rows of 16; 6 and 7 half of those.
  static void begin(int num_rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.bytes_per_row[tile] = tile == 6 ? 32 : 64;
      config.rows[tile] = static_cast<uint8_t>(tile == 5 ? kTileRows : tile == 7 ? kTileRows / 2 : num_rows);
    }
    load_tile_config(config);
  }
  static void end() { _tile_release(); }

  // products[16, kChunkTokens] of queries [16, dim] with the keys of tiles.
  static void score(const bf16* queries, int, const Chunk& chunk, int end_tile, int64_t dim, float* products,
                    Ahead& ahead) {
    order_memory();
    for (int first = chunk.first_tile; first < end_tile; first += 4) {
      const int count = end_tile - first < 4 ? end_tile - first : 4;
      const Tile* tiles = chunk.tiles + first;
      clear_sums();
      int64_t i = 0;
      for (; i + 32 <= dim; i += 32) {
        ahead.ask(count * 1024);
        _tile_loadd(4, queries + i, dim * 2);
        OCTAVO_ADD_PRODUCT(0, 4, 5, tiles[0].key + i * 32, 64);
        if (count > 1) OCTAVO_ADD_PRODUCT(1, 4, 5, tiles[1].key + i * 32, 64);
        if (count > 2) OCTAVO_ADD_PRODUCT(2, 4, 5, tiles[2].key + i * 32, 64);
        if (count > 3) OCTAVO_ADD_PRODUCT(3, 4, 5, tiles[3].key + i * 32, 64);
      }
      if (i < dim) {
        _tile_loadd(6, queries + i, dim * 2);
        OCTAVO_ADD_PRODUCT(0, 6, 7, tiles[0].key + i * 32, 64);
        if (count > 1) OCTAVO_ADD_PRODUCT(1, 6, 7, tiles[1].key + i * 32, 64);
        if (count > 2) OCTAVO_ADD_PRODUCT(2, 6, 7, tiles[2].key + i * 32, 64);
        if (count > 3) OCTAVO_ADD_PRODUCT(3, 6, 7, tiles[3].key + i * 32, 64);
      }
      store_sums(products + first * kTileTokens, kChunkTokens * 4, count);
    }
    order_memory();
  }

  // sums[16, dim] of weights [16, kChunkTokens] with the values of tiles.
  static void weigh(const bf16* weights, int, const Chunk& chunk, int end_tile, int64_t dim, float* to, Ahead& ahead) {
    order_memory();
    for (int64_t first = 0; first < dim; first += 64) {
      const int count = dim - first < 64 ? static_cast<int>(dim - first) / 16 : 4;
      clear_sums();
      for (int i = chunk.first_tile; i < end_tile; i++) {
        ahead.ask(count * 512);
        const char* values = chunk.tiles[i].value + first * 4;
        _tile_loadd(6, weights + i * kTileTokens, kChunkTokens * 2);
        OCTAVO_ADD_PRODUCT(0, 6, 7, values, dim * 4);
        if (count > 1) OCTAVO_ADD_PRODUCT(1, 6, 7, values + 64, dim * 4);
        if (count > 2) OCTAVO_ADD_PRODUCT(2, 6, 7, values + 128, dim * 4);
        if (count > 3) OCTAVO_ADD_PRODUCT(3, 6, 7, values + 192, dim * 4);
      }
      store_sums(to + first, dim * 4, count);
    }
    order_memory();
  }
};

#undef OCTAVO_ADD_PRODUCT

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
