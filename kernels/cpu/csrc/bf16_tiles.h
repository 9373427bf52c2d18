// Products of bfloat16 with AMX: 32 rows and a panel of 32 columns at a time, wherever the weights come from.
//
// Two tiles of rows and two of columns make four tiles of sums, which is the most that eight tiles allow without
// loading one twice. The rows of a tile do not know of each other, so one row goes the way of 32, with tiles of one
// row. The tile unit takes a load of 64 bytes in each cycle, of which the second-level cache can give half: so a part
// of a panel that fills most of the first-level cache stays there while blocks of rows pass, which are loaded with
// the hint that they are used once (a third faster than without). Sums wait in memory for the next part, as fp32, so
// that parts do not change them. They are finished while the next block is multiplied: the tile unit and the vector
// units work side by side.
#pragma once

#if defined(OCTAVO_AMX)

#include "amx.h"
#include "dense_layout.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTwoTileRows = 2 * kTileRows;
// The weights of a step: [16 pairs of inputs][32 columns][2].
constexpr int kStepBytes = kInputsPerTile * kPanelColumns * sizeof(bf16);

// The tile registers of this thread, which no other code may find in use.
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
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.rows[tile] = rows[tile];
      config.bytes_per_row[tile] = 64;
    }
    load_tile_config(config);
  }

 private:
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
    const float* from = pending.sums + (pending.next / kTileRows * kTileRows + pending.next) * kLanes;
    const F32 first = load(from), second = load(from + kTileRows * kLanes);
    finish_row(output, pending.first_row + pending.next, pending.panel, first, second);
  }
}

// A part of a product: one block of rows times some steps of one panel.
struct TilePart {
  const bf16* x;
  const char* weights;
  int64_t num_steps;
  const float* partial;  // sums of the steps before, [4][16][16]; null: there are none
  float* sums;           // [4][16][16]
  const char* ahead;     // what is to be in the cache soon
  int64_t ahead_bytes;   // for each step
};

constexpr int kTileSums = kTileRows * kLanes;

// kIsAlone: no other rows use these weights.
template <bool kHasLower, bool kIsAlone>
OCTAVO_INLINE void multiply_part(const LinearOutput& output, const TilePart& part, int64_t stride,
                                 PendingSums& pending) {
  constexpr int kWeightStride = kPanelColumns * 4;
  const int64_t stride_bytes = stride * sizeof(bf16);
  const int rows_per_step = static_cast<int>(divide_up(pending.num_rows - pending.next, part.num_steps));
  const bf16 *x = part.x, *lower = x + kTileRows * stride;
  const char *weights = part.weights, *ahead = part.ahead;
  asm volatile("" : : : "memory");  // a load of a tile does not tell the compiler what it reads
  if (part.partial == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, part.partial, 64);
    _tile_loadd(1, part.partial + kTileSums, 64);
    _tile_loadd(2, part.partial + 2 * kTileSums, 64);
    _tile_loadd(3, part.partial + 3 * kTileSums, 64);
  }
  for (int64_t step = 0; step < part.num_steps; step++) {
    for (int64_t i = 0; i < part.ahead_bytes; i += 64) {
      _mm_prefetch(ahead + i, kIsAlone ? _MM_HINT_T0 : _MM_HINT_T1);
    }
    ahead += part.ahead_bytes;
    if constexpr (kIsAlone) {
      _tile_loadd(4, x, stride_bytes);
      if constexpr (kHasLower) _tile_loadd(5, lower, stride_bytes);
    } else {
      _tile_stream_loadd(4, x, stride_bytes);
      if constexpr (kHasLower) _tile_stream_loadd(5, lower, stride_bytes);
    }
    _tile_loadd(6, weights, kWeightStride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kHasLower) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + 64, kWeightStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kHasLower) _tile_dpbf16ps(3, 5, 7);
    x += kInputsPerTile;
    lower += kInputsPerTile;
    weights += kStepBytes;
    finish_rows(output, pending, rows_per_step);
  }
  _tile_stored(0, part.sums, 64);
  _tile_stored(1, part.sums + kTileSums, 64);
  if constexpr (kHasLower) {
    _tile_stored(2, part.sums + 2 * kTileSums, 64);
    _tile_stored(3, part.sums + 3 * kTileSums, 64);
  }
}

// The rows that are multiplied: bfloat16, [rows][num_inputs].
struct RowsOfX {
  const bf16* x;
  int64_t num_inputs;
};

// Rows of x filled up to whole tiles: where they are, or in `copy`.
static const bf16* rows_for_tiles(const RowsOfX& rows, const Item& item, int64_t num_padded, bf16* copy) {
  const bf16* x = rows.x + item.first_row * rows.num_inputs;
  if (num_padded == rows.num_inputs) return x;
  for (int64_t row = 0; row < item.end_row - item.first_row; row++) {
    copy_row(copy + row * num_padded, x + row * rows.num_inputs, rows.num_inputs, num_padded);
  }
  return copy;
}

// Steps whose weights fill most of the first-level cache: 36 KiB.
constexpr int64_t kStepsPerPart = 18;

// `Weights` gives parts of a panel: `get(panel, step, count, scratch)` returns where the weights of `count` steps lie,
// which may be in `scratch`, of `kScratchBytes`, and `held(panel, step)` where they are held, `kHeldStepBytes` for each
// step, all panels one behind the other. With one block of rows there are `kStepsAlone` in a part, whose memory `get` asks
// for ahead of time if `kAsksAhead`.
template <class Weights>
static void compute_with_tiles(const RowsOfX& rows, const Weights& weights_of, const LinearOutput& output, Work& work,
                               const Item& item, Tiles& tiles) {
  constexpr int kBlockSums = 4 * kTileSums;
  alignas(64) float sums[2][kBlockSums];
  const int64_t num_steps = divide_up(rows.num_inputs, kInputsPerTile), num_padded = num_steps * kInputsPerTile;
  const int64_t num_rows = item.end_row - item.first_row, num_blocks = divide_up(num_rows, kTwoTileRows);
  const bool is_alone = num_blocks == 1;
  const int64_t num_parts = divide_up(num_steps, is_alone ? Weights::kStepsAlone : kStepsPerPart);
  const int64_t steps_per_part = divide_up(num_steps, num_parts);
  const int64_t partial_bytes = num_parts == 1 ? 0 : num_blocks * kBlockSums * sizeof(float);
  const int64_t copy_bytes = num_padded == rows.num_inputs ? 0 : num_rows * num_padded * sizeof(bf16);
  char* scratch = static_cast<char*>(work.scratch(Weights::kScratchBytes + partial_bytes + copy_bytes + 64));
  if (scratch == nullptr) return;
  float* partial = reinterpret_cast<float*>(scratch + Weights::kScratchBytes);
  bf16* copy = reinterpret_cast<bf16*>(scratch + Weights::kScratchBytes + partial_bytes);
  const bf16* x = rows_for_tiles(rows, item, num_padded, copy);
  const int64_t ahead_bytes =
      is_alone && Weights::kAsksAhead ? 0 : divide_up(Weights::kHeldStepBytes, 64 * num_blocks) * 64;
  PendingSums pending;
  int turn = 0;
  for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
    for (int64_t step = 0; step < num_steps; step += steps_per_part) {
      const int64_t num_part_steps = num_steps - step < steps_per_part ? num_steps - step : steps_per_part;
      const char* weights = weights_of.get(panel, step, num_part_steps, scratch);
      const char* ahead = weights_of.held(panel, step) +
                          (is_alone ? kPrefetchBytes : num_part_steps * Weights::kHeldStepBytes);
      const bool is_last = step + num_part_steps == num_steps;
      for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first_row = block * kTwoTileRows, num_left = num_rows - first_row;
        const int num_block_rows = static_cast<int>(num_left < kTwoTileRows ? num_left : kTwoTileRows);
        float* waiting = partial + block * kBlockSums;
        const TilePart part{x + first_row * num_padded + step * kInputsPerTile,
                            weights,
                            num_part_steps,
                            step == 0 ? nullptr : waiting,
                            is_last ? sums[turn] : waiting,
                            ahead + block * num_part_steps * ahead_bytes,
                            ahead_bytes};
        tiles.shape(num_block_rows);
        if (is_alone) {
          num_block_rows > kTileRows ? multiply_part<true, true>(output, part, num_padded, pending)
                                     : multiply_part<false, true>(output, part, num_padded, pending);
        } else {
          num_block_rows > kTileRows ? multiply_part<true, false>(output, part, num_padded, pending)
                                     : multiply_part<false, false>(output, part, num_padded, pending);
        }
        if (is_last) {
          pending = {sums[turn], item.first_row + first_row, panel, num_block_rows, 0};
          turn ^= 1;
        }
      }
    }
  }
  finish_rows(output, pending, pending.num_rows);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
