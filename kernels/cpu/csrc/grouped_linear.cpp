// Products with weights of GGUF blocks, in whole numbers.

#include "grouped_sums.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Up to so many rows each thread rounds all of them for itself, which takes less time than to wait for the others.
constexpr int64_t kRowsRoundedByEach = 2;
constexpr int kFewRows = 8;  // whose sums find room in registers

struct GroupedLinearArgs {
  const void* x;  // [rows, num_inputs]
  int64_t x_is_bf16;
  GroupedWeight weight;
  RowGroup* rounded;  // [rows / 16, rounded up][num_inputs / 32]; scratch
  LinearOutput output;
};

int64_t num_groups(const GroupedLinearArgs& args) { return args.weight.num_inputs / kGroupInputs; }

// Rounds a row of the activations; a row beyond the last makes up its block.
template <class Format>
void round_one_row(const GroupedLinearArgs& args, int64_t row, int64_t num_rows, RowGroup* to) {
  constexpr int32_t kZeroCode = Format::kZeroCode;
  if (args.x_is_bf16) {
    round_row(static_cast<const bf16*>(args.x), row, num_rows, num_groups(args), kZeroCode, to);
  } else {
    round_row(static_cast<const float*>(args.x), row, num_rows, num_groups(args), kZeroCode, to);
  }
}

template <class Format, int kRows>
void compute_block(const GroupedLinearArgs& args, const RowGroup* x, int64_t row, int64_t panel) {
  const char* codes = grouped_panel<Format>(args.weight, panel);
  const RowGroup* block = x + row / kBlockRows * num_groups(args);
  F32 sums[kRows][2];
  multiply_rows<Format, kRows>(block, static_cast<int>(row % kBlockRows), codes, num_groups(args), sums);
  for (int i = 0; i < kRows; i++) finish_row(args.output, row + i, panel, sums[i][0], sums[i][1]);
}

// Up to kFewRows rows.
template <class Format, int kRows = kFewRows>
void compute_rows(const GroupedLinearArgs& args, const RowGroup* x, int64_t row, int64_t num_rows, int64_t panel) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return compute_rows<Format, kRows - 1>(args, x, row, num_rows, panel);
  }
  compute_block<Format, kRows>(args, x, row, panel);
}

template <class Format>
void compute(const GroupedLinearArgs& args, Work& work) {
  const RowGroup* x = args.rounded;
  if (work.num_rows <= kRowsRoundedByEach) {
    auto* own = static_cast<RowGroup*>(work.scratch(num_groups(args) * sizeof(RowGroup)));
    if (own == nullptr) return;
    for (int64_t row = 0; row < work.num_rows; row++) round_one_row<Format>(args, row, work.num_rows, own);
    x = own;
  }
  const Split split = split_of<Format>(args.weight, num_groups(args) * (sizeof(RowGroup) / kBlockRows), work);
  for (int64_t index = work.take(); index < split.num_items(); index = work.take()) {
    const Item item = split.item(index);
    for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
      for (int64_t row = item.first_row; row < item.end_row; row += kFewRows) {
        compute_rows<Format>(args, x, row, item.end_row - row, panel);
      }
    }
  }
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
