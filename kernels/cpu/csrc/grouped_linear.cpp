// Products with weights of GGUF blocks.

#include "grouped_sums.h"
#include "grouped_tiles.h"
#include "item_split.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Up to so many rows each thread rounds all of them for itself, which takes less time than to wait for the others.
constexpr int64_t kRowsRoundedByEach = 2;

#if defined(OCTAVO_AMX)
using Rounded = FineGroup;
constexpr int kFewRows = 3;  // more take less time in the tile unit
#else
using Rounded = RowGroup;
constexpr int kFewRows = 8;  // whose sums find room in registers
#endif

struct GroupedLinearArgs {
  const void* x;  // [rows, num_inputs]
  int64_t x_is_bf16;
  GroupedWeight weight;
  Rounded* rounded;  // [rows / 16, rounded up][num_inputs / 32]; scratch
  LinearOutput output;
};

int64_t num_groups(const GroupedLinearArgs& args) { return args.weight.num_inputs / kGroupInputs; }

template <class T>
void round_row_of(const GroupedLinearArgs& args, int64_t row, int64_t num_rows, int32_t zero_code, Rounded* to) {
  const T* x = static_cast<const T*>(args.x);
#if defined(OCTAVO_AMX)
  if (row < num_rows) round_finely(x, row, num_groups(args), zero_code, to);
#else
  round_row(x, row, num_rows, num_groups(args), zero_code, to);
#endif
}

// Rounds a row of the activations; a row beyond the last makes up its block.
template <class Format>
void round_one_row(const GroupedLinearArgs& args, int64_t row, int64_t num_rows, Rounded* to) {
  if (args.x_is_bf16) {
    round_row_of<bf16>(args, row, num_rows, Format::kZeroCode, to);
  } else {
    round_row_of<float>(args, row, num_rows, Format::kZeroCode, to);
  }
}

template <class Format, int kRows>
void compute_block(const GroupedLinearArgs& args, const Rounded* x, int64_t row, int64_t panel) {
  const char* codes = grouped_panel<Format>(args.weight, panel);
  const Rounded* block = x + row / kBlockRows * num_groups(args);
  const int first = static_cast<int>(row % kBlockRows);
  F32 sums[kRows][2];
#if defined(OCTAVO_AMX)
  multiply_few<Format, kRows>(block, first, codes, num_groups(args), sums);
#else
  multiply_rows<Format, kRows>(block, first, codes, num_groups(args), sums);
#endif
  for (int i = 0; i < kRows; i++) finish_row(args.output, row + i, panel, sums[i][0], sums[i][1]);
}

// Up to kFewRows rows.
template <class Format, int kRows = kFewRows>
void compute_rows(const GroupedLinearArgs& args, const Rounded* x, int64_t row, int64_t num_rows, int64_t panel) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return compute_rows<Format, kRows - 1>(args, x, row, num_rows, panel);
  }
  compute_block<Format, kRows>(args, x, row, panel);
}

template <class Format>
void compute_item(const GroupedLinearArgs& args, const Rounded* x, const Item& item) {
  for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
    for (int64_t row = item.first_row; row < item.end_row; row += kFewRows) {
      compute_rows<Format>(args, x, row, item.end_row - row, panel);
    }
  }
}

// Computes the items that this thread gets, each with `compute_item`.
template <class Format, class ComputeItem>
void compute_items(const GroupedLinearArgs& args, Work& work, ComputeItem compute_item) {
  const GroupedWeight& weight = args.weight;
  const int64_t panel_bytes = num_groups(args) * kPanelGroupBytes<Format>;
  const Split split(num_panels(weight.num_outputs, weight.is_gated), panel_bytes, work.num_rows,
                    num_groups(args) * (sizeof(Rounded) / kBlockRows), work.num_threads());
  for (int64_t index = work.take(); index < split.num_items(); index = work.take()) compute_item(split.item(index));
}

#if defined(OCTAVO_AMX)

template <class Format>
void compute_many_rows(const GroupedLinearArgs& args, Work& work) {
  const int64_t num_blocks = divide_up(work.num_rows, kTileRows);
  auto* memory = static_cast<char*>(work.scratch(sizeof(Turn<Format>) + num_blocks * kBlockTotals * sizeof(float)));
  if (memory == nullptr) return;
  auto& turn = *reinterpret_cast<Turn<Format>*>(memory);
  auto* totals = reinterpret_cast<float*>(memory + sizeof(Turn<Format>));
  GroupTiles<Format> tiles;
  compute_items<Format>(args, work, [&](const Item& item) {
    compute_with_tiles<Format>(args.rounded, args.weight, args.output, item, tiles, turn, totals);
  });
}

#endif

template <class Format>
void compute(const GroupedLinearArgs& args, Work& work) {
#if defined(OCTAVO_AMX)
  if (work.num_rows > kFewRows) return compute_many_rows<Format>(args, work);
#endif
  const Rounded* x = args.rounded;
  if (work.num_rows <= kRowsRoundedByEach) {
    auto* own = static_cast<Rounded*>(work.scratch(num_groups(args) * sizeof(Rounded)));
    if (own == nullptr) return;
    for (int64_t row = 0; row < work.num_rows; row++) round_one_row<Format>(args, row, work.num_rows, own);
    x = own;
  }
  compute_items<Format>(args, work, [&](const Item& item) { compute_item<Format>(args, x, item); });
}

// Rounds the activations, where that is shared out.
OCTAVO_KERNEL(grouped_linear, GroupedLinearArgs) {
  if (work.num_rows <= kRowsRoundedByEach) return;
  const int64_t num_padded = divide_up(work.num_rows, kBlockRows) * kBlockRows;
  with_format(args.weight, [&](auto format) {
    for (int64_t row = work.take(); row < num_padded; row = work.take()) {
      round_one_row<decltype(format)>(args, row, work.num_rows, args.rounded);
    }
  });
}

OCTAVO_PHASE(grouped_linear, 2, GroupedLinearArgs) {
  if (work.num_rows == 0) return;
  with_format(args.weight, [&](auto format) { compute<decltype(format)>(args, work); });
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
