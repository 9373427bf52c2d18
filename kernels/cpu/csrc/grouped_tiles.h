// Products of many rows with AMX: the tile unit finds a group's whole numbers for 8 rows and 32 columns while the vector
// units add those of the group before.
//
// A panel's codes are spread to bytes with a sign once and then serve all rows. A block is 8 rows, not 16, because then
// its 16 vectors of sums stay in registers from the first group to the last. What bounds it is the addition: 3 vector
// operations for 16 sums of a group (4 with minimums).
#pragma once

#if defined(OCTAVO_AMX)

#include "grouped_sums.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int64_t kLeastRowsForTiles = 5;
constexpr int kTileRowBytes = 64;
constexpr int kTileCodeBytes = 8 * kTileRowBytes;  // 32 inputs of 16 columns

// The tile registers of this thread, which no other code must find in use.
class GroupedTiles {
 public:
  // Sums in tiles 0 and 1, rows of x in 2, columns of the weight in 3 and 4.
  GroupedTiles() {
    struct {  // Intel's manual, volume 1, 18.2
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, kGroupInputs, 64, 64};
      uint8_t rows[16] = {kBlockRows, kBlockRows, kBlockRows, 8, 8};
    } config;
    _tile_loadconfig(&config);
  }
  ~GroupedTiles() { _tile_release(); }
};

// A group of a panel, spread.
struct SpreadGroup {
  float scales[kPanelColumns];
  float minimums[kPanelColumns];
  int8_t codes[2][kTileCodeBytes];  // less the zero code: [inputs / 4][16 columns][4]
};

template <class Format>
OCTAVO_INLINE void spread_group(const char* group, SpreadGroup& to) {
  for (int half = 0; half < 2; half++) {
    store(to.scales + half * kLanes, load_halves(panel_head(group, 0) + half * kLanes));
    if constexpr (Format::kHasMinimum) {
      store(to.minimums + half * kLanes, load_halves(panel_head(group, 1) + half * kLanes));
    }
    const char* codes = panel_codes<Format>(group, half);
    for (int word = 0; word < Format::kWords; word++) {
      const __m512i bytes = _mm512_loadu_si512(codes + word * kVectorBytes);
      int8_t* tile = to.codes[half] + word * kTileRowBytes;
      if constexpr (Format::kWords == 8) {
        _mm512_store_si512(tile, _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)));
      } else {
        const __m512i low_mask = _mm512_set1_epi8(15), zero_code = _mm512_set1_epi8(Format::kZeroCode);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_mask);
        _mm512_store_si512(tile, _mm512_sub_epi8(_mm512_and_si512(bytes, low_mask), zero_code));
        _mm512_store_si512(tile + 4 * kTileRowBytes, _mm512_sub_epi8(high, zero_code));
      }
    }
  }
}

struct TileSums {
  int32_t of[2][kBlockRows][kLanes];
};

// The whole numbers of a group. The processor renames tiles, so groups do not wait for each other.
OCTAVO_INLINE void multiply_tiles(const RowGroup& x, const SpreadGroup& weights, TileSums& to) {
  _tile_loadd(2, x.codes, kGroupInputs);
  _tile_loadd(3, weights.codes[0], kTileRowBytes);
  _tile_zero(0);
  _tile_dpbssd(0, 2, 3);
  _tile_loadd(4, weights.codes[1], kTileRowBytes);
  _tile_zero(1);
  _tile_dpbssd(1, 2, 4);
  _tile_stored(0, to.of[0], kTileRowBytes);
  _tile_stored(1, to.of[1], kTileRowBytes);
}

template <class Format>
OCTAVO_INLINE void add_tiles(const RowGroup& x, const SpreadGroup& weights, const TileSums& from,
                             BlockSums<kBlockRows>& sums) {
  const F32 scales[2] = {load(weights.scales), load(weights.scales + kLanes)};
  F32 minimums[2] = {};
  if constexpr (Format::kHasMinimum) {
    minimums[0] = load(weights.minimums);
    minimums[1] = load(weights.minimums + kLanes);
  }
#pragma GCC unroll 8
  for (int row = 0; row < kBlockRows; row++) {
    const F32 scale = splat(x.scales[row]), sum = splat(x.sums[row]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const F32 whole = (F32)_mm512_cvtepi32_ps(_mm512_load_si512(from.of[half][row]));
      F32& total = sums.of[row][half];
      total = fma(whole * scales[half], scale, total);
      if constexpr (Format::kHasMinimum) total = fma(minimums[half], sum, total);
    }
  }
}

template <class Format>
OCTAVO_INLINE BlockSums<kBlockRows> multiply_block_with_tiles(const RowGroup* x, const SpreadGroup* weights,
                                                              int64_t num_groups) {
  alignas(64) TileSums found[2];
  BlockSums<kBlockRows> sums{};
  multiply_tiles(x[0], weights[0], found[0]);
  for (int64_t group = 0; group < num_groups; group++) {
    const int64_t next = group + 1 < num_groups ? group + 1 : group;
    multiply_tiles(x[next], weights[next], found[next % 2]);
    add_tiles<Format>(x[group], weights[group], found[group % 2], sums);
  }
  return sums;
}

template <class Format>
void compute_item_with_tiles(const GroupedWeight& weight, const LinearOutput& output, Work& work, const RowGroup* x,
                             int64_t first_panel, int64_t end_panel, int64_t first_row, int64_t end_row) {
  const int64_t num_groups = weight.num_inputs / kGroupInputs;
  auto* spread = static_cast<SpreadGroup*>(work.scratch(num_groups * sizeof(SpreadGroup)));
  if (spread == nullptr) return;
  const GroupedTiles tiles;
  for (int64_t panel = first_panel; panel < end_panel; panel++) {
    const char* from = grouped_panel<Format>(weight, panel);
    for (int64_t group = 0; group < num_groups; group++) {
      spread_group<Format>(from + group * kPanelGroupBytes<Format>, spread[group]);
    }
    asm volatile("" ::: "memory");  // tiles are loaded behind the compiler's back
    for (int64_t row = first_row; row < end_row; row += kBlockRows) {
      const BlockSums<kBlockRows> sums =
          multiply_block_with_tiles<Format>(x + row / kBlockRows * num_groups, spread, num_groups);
      for (int i = 0; i < kBlockRows && row + i < end_row; i++) {
        finish_row(output, row + i, panel, sums.of[i][0], sums.of[i][1]);
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
