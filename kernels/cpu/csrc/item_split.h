// How a product is shared out among threads: items of neighbouring panels times neighbouring rows.
#pragma once

#include "linear_parts.h"

namespace octavo {
namespace OCTAVO_ISA {

// The part of a product that a thread computes at a time.
struct Item {
  int64_t first_row, end_row, first_panel, end_panel;
};

// Panels of an item are read once from memory and then stay in the second-level cache while rows pass, as do the rows.
constexpr int64_t kItemPanelBytes = 256 << 10, kItemRowBytes = 1 << 20;
// So many items for each thread, so that one of them is not left alone with the last for long.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kRowGranularity = 96;  // whole blocks of rows on every instruction set

OCTAVO_INLINE int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// How a product is split into items; which item a sum is in does not change it.
class Split {
 public:
  // `panel_bytes` and `row_bytes` are what a panel and a row of x take in memory.
  Split(int64_t num_panels, int64_t panel_bytes, int64_t num_rows, int64_t row_bytes, int num_threads)
      : num_rows_(num_rows), num_panels_(num_panels) {
    const int64_t num_wanted = kItemsPerThread * num_threads;
    panels_per_item_ = clamp(num_panels_ / num_wanted, 1, clamp(kItemPanelBytes / panel_bytes, 1, num_panels_));
    num_panel_groups_ = divide_up(num_panels_, panels_per_item_);
    const int64_t fewest_groups = divide_up(num_rows * row_bytes, kItemRowBytes);
    const int64_t num_groups = clamp(divide_up(num_wanted, num_panel_groups_), fewest_groups, num_rows);
    rows_per_item_ = divide_up(divide_up(num_rows, num_groups), kRowGranularity) * kRowGranularity;
    num_row_groups_ = divide_up(num_rows, rows_per_item_);
  }

  int64_t num_items() const { return num_panel_groups_ * num_row_groups_; }

  Item item(int64_t index) const {
    const int64_t first_panel = index / num_row_groups_ * panels_per_item_;
    const int64_t first_row = index % num_row_groups_ * rows_per_item_;
    return {first_row, clamp(first_row + rows_per_item_, 0, num_rows_), first_panel,
            clamp(first_panel + panels_per_item_, 0, num_panels_)};
  }

 private:
  int64_t num_rows_, num_panels_, panels_per_item_, num_panel_groups_, rows_per_item_, num_row_groups_;
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
