// Products with weights of GGUF blocks.

#include "grouped_sums.h"
#include "grouped_widened.h"
#include "item_split.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Up to so many rows each thread rounds all of them for itself, which takes less time than to wait for the others.
constexpr int64_t kRowsRoundedByEach = 2;

struct GroupedLinearArgs {
  const void* x;  // [rows, num_inputs]
  int64_t x_is_bf16;
  GroupedWeight weight;
  RowGroup* rounded;  // [rows / 16, rounded up][num_inputs / 32]; scratch
  LinearOutput output;
};

template <class Format>
void round_one_row(const GroupedLinearArgs& args, int64_t row, int64_t num_rows, RowGroup* to) {
  const int64_t num_groups = args.weight.num_inputs / kGroupInputs;
  constexpr int32_t kZeroCode = Format::kZeroCode;
  if (args.x_is_bf16) {
    round_row(static_cast<const bf16*>(args.x), row, num_rows, num_groups, kZeroCode, to);
  } else {
    round_row(static_cast<const float*>(args.x), row, num_rows, num_groups, kZeroCode, to);
  }
}

// The rows of activations, rounded; nullptr without memory.
template <class Format>
const RowGroup* rounded_rows(const GroupedLinearArgs& args, Work& work) {
  if (work.num_rows > kRowsRoundedByEach) return args.rounded;
  const int64_t num_groups = args.weight.num_inputs / kGroupInputs;
  auto* own = static_cast<RowGroup*>(work.scratch(num_groups * sizeof(RowGroup)));
  for (int64_t row = 0; own != nullptr && row < work.num_rows; row++) {
    round_one_row<Format>(args, row, work.num_rows, own);
  }
  return own;
}

template <class Format, int kRows>
void compute_block(const GroupedLinearArgs& args, const RowGroup* x, int64_t row, int64_t panel) {
  const int64_t num_groups = args.weight.num_inputs / kGroupInputs;
  const char* codes = grouped_panel<Format>(args.weight, panel);
  const RowGroup* block = x + row / kBlockRows * num_groups;
  F32 sums[kRows][2];
  multiply_rows<Format, kRows>(block, static_cast<int>(row % kBlockRows), codes, num_groups, sums);
  for (int i = 0; i < kRows; i++) finish_row(args.output, row + i, panel, sums[i][0], sums[i][1]);
}

constexpr int kMostRows = 8;  // whose sums find room in registers

template <class Format>
void compute_rows(const GroupedLinearArgs& args, const RowGroup* x, int64_t row, int64_t num_rows, int64_t panel) {
  switch (num_rows) {
    case 1: return compute_block<Format, 1>(args, x, row, panel);
    case 2: return compute_block<Format, 2>(args, x, row, panel);
    case 3: return compute_block<Format, 3>(args, x, row, panel);
    case 4: return compute_block<Format, 4>(args, x, row, panel);
    case 5: return compute_block<Format, 5>(args, x, row, panel);
    case 6: return compute_block<Format, 6>(args, x, row, panel);
    case 7: return compute_block<Format, 7>(args, x, row, panel);
    default: return compute_block<Format, kMostRows>(args, x, row, panel);
  }
}

template <class Format>
void compute_item(const GroupedLinearArgs& args, const RowGroup* x, const Item& item) {
  for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
    for (int64_t row = item.first_row; row < item.end_row; row += kMostRows) {
      compute_rows<Format>(args, x, row, item.end_row - row, panel);
    }
  }
}

template <class Format>
Split split_of(const GroupedLinearArgs& args, int64_t row_bytes, Work& work) {
  const GroupedWeight& weight = args.weight;
  const int64_t panel_bytes = weight.num_inputs / kGroupInputs * kPanelGroupBytes<Format>;
  return Split(num_panels(weight.num_outputs, weight.is_gated), panel_bytes, work.num_rows, row_bytes,
               work.num_threads());
}

#if defined(OCTAVO_AMX)

template <class Format>
void compute_widened(const GroupedLinearArgs& args, Work& work) {
  const Split split = split_of<Format>(args, args.weight.num_inputs * sizeof(bf16), work);
  const TileRowsOfX x{static_cast<const bf16*>(args.x), args.weight.num_inputs};
  Tiles tiles;
  for (int64_t index = work.take(); index < split.num_items(); index = work.take()) {
    compute_with_tiles(x, WidenedPanels<Format>{args.weight}, args.output, work, split.item(index), tiles);
  }
}

#endif

bool is_widened(const GroupedLinearArgs& args) {
#if defined(OCTAVO_AMX)
  return args.x_is_bf16;
#else
  (void)args;
  return false;
#endif
}

template <class Format>
void compute(const GroupedLinearArgs& args, Work& work) {
#if defined(OCTAVO_AMX)
  if (is_widened(args)) return compute_widened<Format>(args, work);
#endif
  const RowGroup* x = rounded_rows<Format>(args, work);
  if (x == nullptr) return;
  const Split split = split_of<Format>(args, args.weight.num_inputs, work);
  for (int64_t index = work.take(); index < split.num_items(); index = work.take()) {
    compute_item<Format>(args, x, split.item(index));
  }
}

// Rounds the activations, where that is shared out.
OCTAVO_KERNEL(grouped_linear, GroupedLinearArgs) {
  if (is_widened(args) || work.num_rows <= kRowsRoundedByEach) return;
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
