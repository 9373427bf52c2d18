// Dense products of bfloat16 with AMX: 32 rows and a panel of 32 columns at a time.
//
// Two tiles of rows and two of columns make four tiles of sums, which is the most that eight tiles allow without loading
// one twice. The rows of a tile do not know of each other, so one row goes the way of 32, with tiles of one row. The sums
// of a panel are finished while the next one is multiplied, because the tile unit and the vector units work side by side.
#pragma once

#if defined(OCTAVO_AMX)

#include "dense_layout.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTileRows = 16, kBlockRows = 2 * kTileRows;

// The tile registers of this thread, which no other code must find in use.
class Tiles {
 public:
  ~Tiles() {
    if (num_rows_ != 0) _tile_release();
  }

  // Sums in tiles 0 to 3, rows of x in 4 and 5, columns of the weight in 6 and 7.
  void shape(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    const uint8_t upper = num_rows < kTileRows ? num_rows : kTileRows;
    const uint8_t lower = num_rows > kTileRows ? num_rows - kTileRows : 1;
    alignas(64) Config config{};
    config.palette = 1;
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; tile++) {
      config.rows[tile] = rows[tile];
      config.bytes_per_row[tile] = 64;
    }
    _tile_loadconfig(&config);
  }

 private:
  struct Config {  // Intel's manual, volume 1, 18.2
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  };
  int num_rows_ = 0;
};

// Sums that are still to be finished.
struct PendingSums {
  const float* sums = nullptr;
  int64_t first_row = 0, panel = 0;
  int num_rows = 0, next = 0;
};

OCTAVO_INLINE void finish_rows(const LinearOutput& output, PendingSums& pending, int count) {
  const int end = pending.next + count < pending.num_rows ? pending.next + count : pending.num_rows;
  for (; pending.next < end; pending.next++) {
    const float* from = pending.sums + pending.next * kPanelColumns;
    finish_row(output, pending.first_row + pending.next, pending.panel, load(from), load(from + kLanes));
  }
}

// One block of rows times one panel, into sums [32][32].
template <bool kHasLower, bool kIsFirstUse>
OCTAVO_INLINE void multiply_tiles(const LinearOutput& output, const bf16* x, int64_t stride, const char* panel,
                                  int64_t num_padded, float* sums, PendingSums& pending) {
  const int64_t num_steps = num_padded / kInputsPerTile, stride_bytes = stride * sizeof(bf16);
  const int rows_per_step = static_cast<int>(divide_up(pending.num_rows, num_steps));
  const bf16* lower = x + kTileRows * stride;
  constexpr int kWeightStride = kPanelColumns * 4, kStepBytes = kInputsPerTile * kPanelColumns * 2;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kHasLower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < num_padded; k += kInputsPerTile, panel += kStepBytes) {
    if constexpr (kIsFirstUse) prefetch(panel, kStepBytes);
    _tile_loadd(4, x + k, stride_bytes);
    _tile_loadd(6, panel, kWeightStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 64, kWeightStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kHasLower) {
      _tile_loadd(5, lower + k, stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    finish_rows(output, pending, rows_per_step);
  }
  constexpr int kSumStride = kPanelColumns * sizeof(float);
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kLanes, kSumStride);
  if constexpr (kHasLower) {
    _tile_stored(2, sums + kTileRows * kPanelColumns, kSumStride);
    _tile_stored(3, sums + kTileRows * kPanelColumns + kLanes, kSumStride);
  }
}

// Rows of x filled up to whole tiles: where they are, or a copy in scratch; null after a failure.
static const bf16* rows_for_tiles(const DenseLinearArgs& args, Work& work, int64_t first_row, int num_rows) {
  const int64_t num_inputs = args.weight.num_inputs, num_padded = padded_inputs(args.weight);
  const bf16* x = static_cast<const bf16*>(args.x) + first_row * num_inputs;
  if (num_padded == num_inputs) return x;
  bf16* copy = static_cast<bf16*>(work.scratch(num_rows * num_padded * sizeof(bf16)));
  for (int row = 0; row < num_rows && copy != nullptr; row++) {
    copy_row(copy + row * num_padded, x + row * num_inputs, num_inputs, num_padded);
  }
  return copy;
}

static void compute_with_tiles(const DenseLinearArgs& args, Work& work, const Item& item, Tiles& tiles) {
  alignas(64) float sums[2][kBlockRows * kPanelColumns];
  PendingSums pending;
  int turn = 0;
  const int64_t num_padded = padded_inputs(args.weight);
  for (int64_t first_row = item.first_row; first_row < item.end_row; first_row += kBlockRows) {
    const int64_t num_left = item.end_row - first_row;
    const int num_rows = static_cast<int>(num_left < kBlockRows ? num_left : kBlockRows);
    const bf16* x = rows_for_tiles(args, work, first_row, num_rows);
    if (x == nullptr) return;
    tiles.shape(num_rows);
    const bool is_first_use = first_row == item.first_row;
    for (int64_t panel = item.first_panel; panel < item.end_panel; panel++, turn ^= 1) {
      const char* weights = panel_of(args.weight, panel);
      if (num_rows <= kTileRows) {
        multiply_tiles<false, true>(args.output, x, num_padded, weights, num_padded, sums[turn], pending);
      } else if (is_first_use) {
        multiply_tiles<true, true>(args.output, x, num_padded, weights, num_padded, sums[turn], pending);
      } else {
        multiply_tiles<true, false>(args.output, x, num_padded, weights, num_padded, sums[turn], pending);
      }
      pending = {sums[turn], first_row, panel, num_rows, 0};
    }
  }
  finish_rows(args.output, pending, pending.num_rows);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
