// How bfloat16 and fp32 weights lie in their panels, and what a kernel of a dense product is given.
//
// fp32: [num_inputs][32 columns]. bfloat16: [num_inputs / 2][32 columns][2], so that the two numbers which one
// instruction multiplies and adds lie side by side; the inputs are filled up with zeros to whole tiles of 32.
#pragma once

#include "item_split.h"
#include "linear_parts.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kInputsPerTile = 32;

struct DenseWeight {
  void* panels;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t is_gated;
  int64_t is_bf16;
};

struct DenseLinearArgs {
  const void* x;  // [rows, num_inputs]
  int64_t x_is_bf16;
  DenseWeight weight;
  LinearOutput output;
};

OCTAVO_INLINE int64_t padded_inputs(const DenseWeight& weight) {
  return weight.is_bf16 ? divide_up(weight.num_inputs, kInputsPerTile) * kInputsPerTile : weight.num_inputs;
}

OCTAVO_INLINE int64_t panel_bytes(const DenseWeight& weight) {
  return padded_inputs(weight) * kPanelColumns * (weight.is_bf16 ? sizeof(bf16) : sizeof(float));
}

OCTAVO_INLINE const char* panel_of(const DenseWeight& weight, int64_t panel) {
  return static_cast<const char*>(weight.panels) + panel * panel_bytes(weight);
}

// Copies a row, converted, and fills it up with zeros.
template <class To, class From>
OCTAVO_INLINE void copy_row(To* to, const From* from, int64_t num_inputs, int64_t num_padded) {
  int64_t i = 0;
  for (; i + kLanes <= num_inputs; i += kLanes) store(to + i, load(from + i));
  if (i < num_inputs) store_first(to + i, load_first(from + i, static_cast<int>(num_inputs - i)), num_inputs - i);
  std::memset(static_cast<void*>(to + num_inputs), 0, (num_padded - num_inputs) * sizeof(To));
}

constexpr int kPrefetchBytes = 4096;

OCTAVO_INLINE void prefetch(const char* from, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + kPrefetchBytes + i, 0, 3);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
