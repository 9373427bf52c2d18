// Products of many rows with AMX: the tile unit finds whole numbers of 16 rows and 16 columns, group by group, and then
// the vector units add them.
//
// A panel's codes are spread to bytes with a sign once and then serve all rows. The two units take turns, many groups at
// a time, because the vector unit multiplies at half its speed while tile instructions are under way: a group's tile
// takes 9 ns to find and store, and 8 to add (3 vector operations for 16 sums, 4 with minimums); taking turns in every
// group costs 26. Rejected: tiles of 8 rows, which take as long to store as those of 16.
#pragma once

#if defined(OCTAVO_AMX)

#include "grouped_sums.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int64_t kLeastRowsForTiles = 25;  // fewer take less time without
constexpr int kTileRowBytes = 64;
constexpr int kTileCodeRows = kGroupInputs / 4, kTileCodeBytes = kTileCodeRows * kTileRowBytes;  // 32 inputs of 16 columns

// The tile registers of this thread, which no other code must find in use.
class GroupedTiles {
 public:
  // Sums in tiles 0 and 1, rows of x in 2 and 4, columns of the weight in 3 and 5.
  GroupedTiles() {
    struct {  // Intel's manual, volume 1, 18.2
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, kGroupInputs, 64, kGroupInputs, 64};
      uint8_t rows[16] = {kBlockRows, kBlockRows, kBlockRows, kTileCodeRows, kBlockRows, kTileCodeRows};
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
  int32_t of[kBlockRows][kLanes];
};

// Groups for which whole numbers are found before they are added; these stay in the first-level cache.
constexpr int kGroupsPerTurn = 12;

// The whole numbers of groups. A tile is stored while the next one is multiplied.
OCTAVO_INLINE void find_tiles(const RowGroup* x, const SpreadGroup* weights, int half, int num_groups, TileSums* to) {
  for (int group = 0; group < num_groups; group += 2) {
    _tile_loadd(2, x[group].codes, kGroupInputs);
    _tile_loadd(3, weights[group].codes[half], kTileRowBytes);
    _tile_zero(0);
    _tile_dpbssd(0, 2, 3);
    if (group > 0) _tile_stored(1, to[group - 1].of, kTileRowBytes);
    if (group + 1 < num_groups) {
      _tile_loadd(4, x[group + 1].codes, kGroupInputs);
      _tile_loadd(5, weights[group + 1].codes[half], kTileRowBytes);
      _tile_zero(1);
      _tile_dpbssd(1, 4, 5);
    }
    _tile_stored(0, to[group].of, kTileRowBytes);
  }
  if (num_groups % 2 == 0) _tile_stored(1, to[num_groups - 1].of, kTileRowBytes);
}

template <class Format, int kRows>
OCTAVO_INLINE void add_tile(const RowGroup& x, const SpreadGroup& weights, int half, const TileSums& from,
                            F32 (&sums)[kRows]) {
  const F32 scales = load(weights.scales + half * kLanes);
  F32 minimums{};
  if constexpr (Format::kHasMinimum) minimums = load(weights.minimums + half * kLanes);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) {
    const F32 whole = (F32)_mm512_cvtepi32_ps(_mm512_load_si512(from.of[row]));
    sums[row] = fma(whole * scales, splat(x.scales[row]), sums[row]);
    if constexpr (Format::kHasMinimum) sums[row] = fma(minimums, splat(x.sums[row]), sums[row]);
  }
}

// The sums of the first `kRows` rows of a block for 16 columns of a panel.
template <class Format, int kRows>
void multiply_with_tiles(const RowGroup* x, const SpreadGroup* weights, int half, int64_t num_groups, F32 (&to)[kRows]) {
  alignas(64) TileSums found[kGroupsPerTurn];
  F32 sums[kRows] = {};
  const int64_t num_turns = divide_up(num_groups, kGroupsPerTurn), groups_per_turn = divide_up(num_groups, num_turns);
  for (int64_t first = 0; first < num_groups; first += groups_per_turn) {
    const int count = static_cast<int>(first + groups_per_turn < num_groups ? groups_per_turn : num_groups - first);
    find_tiles(x + first, weights + first, half, count, found);
    for (int i = 0; i < count; i++) add_tile<Format, kRows>(x[first + i], weights[first + i], half, found[i], sums);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) to[row] = sums[row];
}

template <class Format, int kRows>
void compute_block_with_tiles(const LinearOutput& output, const RowGroup* x, const SpreadGroup* weights,
                              int64_t num_groups, int64_t first_row, int64_t num_rows, int64_t panel) {
  F32 sums[2][kRows];
  for (int half = 0; half < 2; half++) multiply_with_tiles<Format, kRows>(x, weights, half, num_groups, sums[half]);
  for (int i = 0; i < kRows && i < num_rows; i++) finish_row(output, first_row + i, panel, sums[0][i], sums[1][i]);
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
      const RowGroup* block = x + row / kBlockRows * num_groups;
      const int64_t num_rows = end_row - row;
      if (num_rows > kBlockRows / 2) {
        compute_block_with_tiles<Format, kBlockRows>(output, block, spread, num_groups, row, num_rows, panel);
      } else {
        compute_block_with_tiles<Format, kBlockRows / 2>(output, block, spread, num_groups, row, num_rows, panel);
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
