// Products with weights of GGUF blocks.

#include "grouped_sums.h"
#include "grouped_tiles.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Up to so many rows each thread rounds all of them for itself, which takes less time than to wait for the others.
constexpr int64_t kRowsRoundedByEach = 2;
// Panels of an item are read once from memory, and stay in the second-level cache while rows pass.
constexpr int64_t kItemPanelBytes = 256 << 10, kItemRows = 256;
constexpr int64_t kItemsPerThread = 8;

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
const RowGroup* round_rows(const GroupedLinearArgs& args, Work& work) {
  if (work.num_rows <= kRowsRoundedByEach) {
    const int64_t num_groups = args.weight.num_inputs / kGroupInputs;
    auto* own = static_cast<RowGroup*>(work.scratch(num_groups * sizeof(RowGroup)));
    for (int64_t row = 0; own != nullptr && row < work.num_rows; row++) {
      round_one_row<Format>(args, row, work.num_rows, own);
    }
    return own;
  }
  const int64_t num_padded = divide_up(work.num_rows, kBlockRows) * kBlockRows;
  for (int64_t row = work.take(); row < num_padded; row = work.take()) {
    round_one_row<Format>(args, row, work.num_rows, args.rounded);
  }
  work.barrier();
  return args.rounded;
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

struct GroupedItem {
  int64_t first_row, end_row, first_panel, end_panel;
};

template <class Format>
void compute_item(const GroupedLinearArgs& args, const RowGroup* x, const GroupedItem& item) {
  for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
    for (int64_t row = item.first_row; row < item.end_row; row += kMostRows) {
      compute_rows<Format>(args, x, row, item.end_row - row, panel);
    }
  }
}

template <class Format>
void compute(const GroupedLinearArgs& args, Work& work) {
  const RowGroup* x = round_rows<Format>(args, work);
  if (x == nullptr) return;
  const int64_t panels = num_panels(args.weight.num_outputs, args.weight.is_gated);
  const int64_t panel_bytes = args.weight.num_inputs / kGroupInputs * kPanelGroupBytes<Format>;
  int64_t panels_per_item = panels / (kItemsPerThread * work.num_threads());
  if (panels_per_item * panel_bytes > kItemPanelBytes) panels_per_item = kItemPanelBytes / panel_bytes;
  if (panels_per_item < 1) panels_per_item = 1;
  const int64_t num_row_parts = divide_up(work.num_rows, kItemRows);
  const int64_t num_items = divide_up(panels, panels_per_item) * num_row_parts;
  for (int64_t index = work.take(); index < num_items; index = work.take()) {
    GroupedItem item;
    item.first_panel = index / num_row_parts * panels_per_item;
    item.end_panel = item.first_panel + panels_per_item < panels ? item.first_panel + panels_per_item : panels;
    item.first_row = index % num_row_parts * kItemRows;
    item.end_row = item.first_row + kItemRows < work.num_rows ? item.first_row + kItemRows : work.num_rows;
#if defined(OCTAVO_AMX)
    if (work.num_rows >= kLeastRowsForTiles) {
      compute_item_with_tiles<Format>(args.weight, args.output, work, x, item.first_panel, item.end_panel,
                                      item.first_row, item.end_row);
      continue;
    }
#endif
    compute_item<Format>(args, x, item);
  }
}

OCTAVO_KERNEL(grouped_linear, GroupedLinearArgs) {
  if (work.num_rows == 0) return;
  with_format(args.weight, [&](auto format) { compute<decltype(format)>(args, work); });
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
