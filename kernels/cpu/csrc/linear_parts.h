// What products with packed weights share, whatever the format: the geometry of panels, and what becomes of the sums.
//
// A weight is packed in panels of 32 columns, one for each output; what lies in a panel is the format's own affair. A
// gated weight has 16 gates and the 16 outputs which they gate in a panel, so that their product is at hand when the sums
// are. Columns beyond the last output are there, as zeros, but are not stored.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kPanelColumns = 32;

enum Activation : int64_t { kNoActivation = 0, kSilu = 1, kGelu = 2 };

// Where the sums of a product go. Sums of a gated weight are joined by the activation, so that a row has half as many
// numbers as the weight has outputs.
struct LinearOutput {
  void* to;             // [rows, num_outputs], or half as many columns with an activation
  const void* bias;     // [num_outputs], of the dtype of `to`; null: there is none
  int64_t num_outputs;  // of the weight
  int64_t activation;   // an Activation
  int64_t is_bf16;      // `to` is bfloat16, else fp32
};

OCTAVO_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

OCTAVO_INLINE int64_t num_panels(int64_t num_outputs, bool is_gated) {
  return is_gated ? divide_up(num_outputs / 2, kLanes) : divide_up(num_outputs, kPanelColumns);
}

struct Place {
  int64_t panel;
  int column;  // in the panel, 0 to 31
};

// Where an output of a weight is.
OCTAVO_INLINE Place place_of(int64_t output, int64_t num_outputs, bool is_gated) {
  if (!is_gated) return {output / kPanelColumns, static_cast<int>(output % kPanelColumns)};
  const int64_t half = num_outputs / 2;
  const bool is_gate = output < half;
  const int64_t pair = is_gate ? output : output - half;
  return {pair / kLanes, static_cast<int>(pair % kLanes) + (is_gate ? 0 : kLanes)};
}

// gate · sigmoid(gate), and GELU in its tanh form, which is gate · sigmoid(2 · sqrt(2 / pi) · (gate + 0.044715 gate³)).
OCTAVO_INLINE F32 activate(F32 gate, bool is_silu) {
  const F32 cubic = fma(gate * gate, splat(-2 * 0.7978845608f * 0.044715f), splat(-2 * 0.7978845608f));
  const F32 negated = is_silu ? -gate : gate * cubic;
  return gate / (splat(1.0f) + exp(negated));
}

// Up to 16 numbers of the bias from `first` on.
template <class T>
OCTAVO_INLINE F32 bias_from(const LinearOutput& output, int64_t first, int64_t count) {
  const T* bias = static_cast<const T*>(output.bias) + first;
  return count >= kLanes ? load(bias) : load_first(bias, static_cast<int>(count));
}

template <class T>
OCTAVO_INLINE void store_up_to(T* to, F32 value, int64_t count) {
  if (count >= kLanes) {
    store(to, value);
  } else if (count > 0) {
    store_first(to, value, static_cast<int>(count));
  }
}

template <class T>
OCTAVO_INLINE void finish_row_as(const LinearOutput& output, int64_t row, int64_t panel, F32 first, F32 second) {
  if (output.activation == kNoActivation) {
    const int64_t column = panel * kPanelColumns, count = output.num_outputs - column;
    if (output.bias != nullptr) {
      first += bias_from<T>(output, column, count);
      if (count > kLanes) second += bias_from<T>(output, column + kLanes, count - kLanes);
    }
    T* to = static_cast<T*>(output.to) + row * output.num_outputs + column;
    store_up_to(to, first, count);
    store_up_to(to + kLanes, second, count - kLanes);
  } else {
    const int64_t half = output.num_outputs / 2, column = panel * kLanes, count = half - column;
    if (output.bias != nullptr) {
      first += bias_from<T>(output, column, count);
      second += bias_from<T>(output, half + column, count);
    }
    T* to = static_cast<T*>(output.to) + row * half + column;
    store_up_to(to, activate(first, output.activation == kSilu) * second, count);
  }
}

// Stores one row's sums of one panel: its columns 0 to 15 and 16 to 31.
OCTAVO_INLINE void finish_row(const LinearOutput& output, int64_t row, int64_t panel, F32 first, F32 second) {
  if (output.is_bf16) {
    finish_row_as<bf16>(output, row, panel, first, second);
  } else {
    finish_row_as<float>(output, row, panel, first, second);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
