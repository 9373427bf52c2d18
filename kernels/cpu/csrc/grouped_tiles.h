// Products of many rows of activations with 12 bits, with AMX.
//
// A row of the tile of activations has the 32 high parts of a group and then the 32 low ones. Columns of 4-bit codes have
// 16 times the codes and then the codes, so that one instruction finds the whole numbers of 16 rows and 16 columns; 8-bit
// codes are too large for that and take two. The vector units are at half their speed while tile instructions are under
// way, so the units take turns of four groups, whose numbers stay in the first-level cache: turns of eight no longer fit
// and took a third longer.
#pragma once

#if defined(OCTAVO_AMX)

#include "amx.h"
#include "grouped_fine.h"
#include "item_split.h"

namespace octavo {
namespace OCTAVO_ISA {

static_assert(kBlockRows == kTileRows);

// Products that make up the sums of a group: one for each half of the columns, and of 8-bit codes one for each part of
// the activations.
template <class Format>
constexpr int kParts = Format::kWords == 8 ? 2 : 1;
template <class Format>
constexpr int kCodeLines = Format::kWords == 8 ? 8 : 16;  // of 64 bytes, for 16 columns

// A group of a panel, spread.
template <class Format>
struct SpreadGroup {
  char codes[2][kCodeLines<Format>][kVectorBytes];
  float scales[kPanelColumns];
  float minimums[kPanelColumns];
};

template <class Format>
struct WholeSums {
  int32_t of[2][kParts<Format>][kTileRows][kLanes];
};

constexpr int kBlockTotals = kTileRows * kPanelColumns;

// The memory of a thread that multiplies.
template <class Format>
struct Turn {
  alignas(64) SpreadGroup<Format> groups[kTurnGroups];
  alignas(64) WholeSums<Format> sums[kTurnGroups];
};

template <class Format>
OCTAVO_INLINE void spread_group(const char* group, SpreadGroup<Format>& to) {
  for (int half = 0; half < 2; half++) {
    store(to.scales + half * kLanes, load_halves(panel_head(group, 0) + half * kLanes));
    if constexpr (Format::kHasMinimum) {
      store(to.minimums + half * kLanes, load_halves(panel_head(group, 1) + half * kLanes));
    }
    const char* codes = panel_codes<Format>(group, half);
    const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(-16);
#pragma GCC unroll 8
    for (int word = 0; word < Format::kWords; word++) {
      const __m512i bytes = _mm512_loadu_si512(codes + word * kVectorBytes);
      char(*lines)[kVectorBytes] = to.codes[half] + word;
      if constexpr (Format::kWords == 8) {
        _mm512_storeu_si512(lines[0], _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)));
      } else {
        _mm512_storeu_si512(lines[0], _mm512_and_si512(_mm512_slli_epi16(bytes, 4), high_bits));
        _mm512_storeu_si512(lines[4], _mm512_and_si512(bytes, high_bits));
        _mm512_storeu_si512(lines[8], _mm512_and_si512(bytes, low_bits));
        _mm512_storeu_si512(lines[12], _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_bits));
      }
    }
  }
}

// The tile registers of this thread, which no other code may find in use.
template <class Format>
class GroupTiles {
 public:
  ~GroupTiles() {
    if (num_rows_ != 0) _tile_release();
  }

  // Sums in tiles 0 to 3, rows of x in 4 and 5, columns of the weight in 6 and 7.
  void shape(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.rows[tile] = tile < 6 ? num_rows : kCodeLines<Format>;
      config.bytes_per_row[tile] = tile == 4 || tile == 5 ? kFineBytes / kParts<Format> : kVectorBytes;
    }
    load_tile_config(config);
  }

 private:
  int num_rows_ = 0;
};

// The whole numbers of some groups for a block of rows. Of 4-bit codes, a group's are stored while the next are found.
template <class Format>
OCTAVO_INLINE void find_sums(const FineGroup* x, Turn<Format>& turn, int num_groups) {
  asm volatile("" : : : "memory");  // a load of a tile does not tell the compiler what it reads
  if constexpr (Format::kWords == 8) {
    for (int group = 0; group < num_groups; group++) {
      _tile_loadd(4, x[group].parts[0], kFineBytes);
      _tile_loadd(5, x[group].parts[0] + kGroupInputs, kFineBytes);
      _tile_loadd(6, turn.groups[group].codes[0], kVectorBytes);
      _tile_loadd(7, turn.groups[group].codes[1], kVectorBytes);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
      _tile_stored(0, turn.sums[group].of[0][0], kVectorBytes);
      _tile_stored(1, turn.sums[group].of[0][1], kVectorBytes);
      _tile_stored(2, turn.sums[group].of[1][0], kVectorBytes);
      _tile_stored(3, turn.sums[group].of[1][1], kVectorBytes);
    }
  } else {
    for (int group = 0; group < num_groups; group += 2) {
      _tile_loadd(4, x[group].parts, kFineBytes);
      _tile_loadd(6, turn.groups[group].codes[0], kVectorBytes);
      _tile_zero(0);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, turn.groups[group].codes[1], kVectorBytes);
      _tile_zero(1);
      _tile_dpbsud(1, 4, 7);
      if (group > 0) {
        _tile_stored(2, turn.sums[group - 1].of[0], kVectorBytes);
        _tile_stored(3, turn.sums[group - 1].of[1], kVectorBytes);
      }
      if (group + 1 < num_groups) {
        _tile_loadd(5, x[group + 1].parts, kFineBytes);
        _tile_loadd(6, turn.groups[group + 1].codes[0], kVectorBytes);
        _tile_zero(2);
        _tile_dpbsud(2, 5, 6);
        _tile_loadd(7, turn.groups[group + 1].codes[1], kVectorBytes);
        _tile_zero(3);
        _tile_dpbsud(3, 5, 7);
      }
      _tile_stored(0, turn.sums[group].of[0], kVectorBytes);
      _tile_stored(1, turn.sums[group].of[1], kVectorBytes);
    }
    if (num_groups % 2 == 0) {
      _tile_stored(2, turn.sums[num_groups - 1].of[0], kVectorBytes);
      _tile_stored(3, turn.sums[num_groups - 1].of[1], kVectorBytes);
    }
  }
  asm volatile("" : : : "memory");
}

template <class Format>
OCTAVO_INLINE F32 whole_sum(const FineGroup& x, const WholeSums<Format>& sums, int half, int row) {
  __m512i whole = _mm512_loadu_si512(sums.of[half][0][row]);
  if constexpr (kParts<Format> == 2) {
    whole = _mm512_add_epi32(_mm512_slli_epi32(whole, 4), _mm512_loadu_si512(sums.of[half][1][row]));
  } else if constexpr (Format::kZeroCode != 0) {
    whole = _mm512_add_epi32(whole, _mm512_set1_epi32(x.starts[row]));
  }
  return (F32)_mm512_cvtepi32_ps(whole);
}

// Adds the groups of a turn to `totals`, [rows][32 columns], for `kRows` rows.
template <class Format, int kRows>
OCTAVO_INLINE void add_turn(const FineGroup* x, const Turn<Format>& turn, int num_groups, bool is_first, float* totals) {
  for (int half = 0; half < 2; half++) {
    F32 parts[kRows] = {};
    for (int group = 0; group < num_groups; group++) {
      const F32 scales = load(turn.groups[group].scales + half * kLanes);
      F32 minimums{};
      if constexpr (Format::kHasMinimum) minimums = load(turn.groups[group].minimums + half * kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; row++) {
        parts[row] = fma(whole_sum<Format>(x[group], turn.sums[group], half, row), scales, parts[row]);
        if constexpr (Format::kHasMinimum) parts[row] = fma(minimums, splat(x[group].sums[row]), parts[row]);
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      float* total = totals + row * kPanelColumns + half * kLanes;
      store(total, fma(parts[row], splat(x[0].scales[row]), is_first ? F32{} : load(total)));
    }
  }
}

template <class Format>
void add_turn_of_rows(const FineGroup* x, const Turn<Format>& turn, int num_groups, int num_rows, bool is_first,
                      float* totals) {
  if (num_rows <= 4) {
    add_turn<Format, 4>(x, turn, num_groups, is_first, totals);
  } else if (num_rows <= 8) {
    add_turn<Format, 8>(x, turn, num_groups, is_first, totals);
  } else {
    add_turn<Format, 16>(x, turn, num_groups, is_first, totals);
  }
}

constexpr int kGroupsAhead = 6;  // of a panel, on their way from memory

// `totals` has room for the item's rows: kBlockTotals for each block of them.
template <class Format>
void compute_with_tiles(const FineGroup* x, const GroupedWeight& weight, const LinearOutput& output, const Item& item,
                        GroupTiles<Format>& tiles, Turn<Format>& turn, float* totals) {
  const int64_t num_groups = weight.num_inputs / kGroupInputs;
  const int64_t num_blocks = divide_up(item.end_row - item.first_row, kTileRows);
  for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
    const char* from = grouped_panel<Format>(weight, panel);
    for (int64_t first = 0; first < num_groups; first += kTurnGroups) {
      const int count = static_cast<int>(num_groups - first < kTurnGroups ? num_groups - first : kTurnGroups);
      for (int group = 0; group < count; group++, from += kPanelGroupBytes<Format>) {
        const char* ahead = from + kGroupsAhead * kPanelGroupBytes<Format>;
        for (int byte = 0; byte < kPanelGroupBytes<Format>; byte += 64) _mm_prefetch(ahead + byte, _MM_HINT_T0);
        spread_group<Format>(from, turn.groups[group]);
      }
      for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first_row = item.first_row + block * kTileRows, num_left = item.end_row - first_row;
        const int num_rows = static_cast<int>(num_left < kTileRows ? num_left : kTileRows);
        const FineGroup* rows = x + first_row / kTileRows * num_groups + first;
        float* block_totals = totals + block * kBlockTotals;
        tiles.shape(num_rows);
        find_sums<Format>(rows, turn, count);
        add_turn_of_rows<Format>(rows, turn, count, num_rows, first == 0, block_totals);
        if (first + count < num_groups) continue;
        for (int row = 0; row < num_rows; row++) {
          const float* sums = block_totals + row * kPanelColumns;
          finish_row(output, first_row + row, panel, load(sums), load(sums + kLanes));
        }
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
