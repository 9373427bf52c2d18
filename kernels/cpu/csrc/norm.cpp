// Root mean square norm of rows, alone or behind the addition of a residual.

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct RmsNormArgs {
  const void* x;         // [rows, hidden_size]
  const void* residual;  // [rows, hidden_size]; null: there is none
  const void* weight;    // [hidden_size]
  void* normed;          // [rows, hidden_size]
  void* total;           // [rows, hidden_size]; x + residual, when there is a residual
  int64_t hidden_size;
  int64_t is_bf16;
  float eps;
};

template <class T>
void norm_row(const RmsNormArgs& args, int64_t row) {
  const int64_t size = args.hidden_size, start = row * size;
  const T* x = static_cast<const T*>(args.x) + start;
  const T* residual = args.residual == nullptr ? nullptr : static_cast<const T*>(args.residual) + start;
  const T* weight = static_cast<const T*>(args.weight);
  T* normed = static_cast<T*>(args.normed) + start;
  T* total = residual == nullptr ? nullptr : static_cast<T*>(args.total) + start;
  F32 squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = static_cast<int>(size - i < kLanes ? size - i : kLanes);
    F32 value = load_first(x + i, count);
    if (residual != nullptr) {
      store_first(total + i, value + load_first(residual + i, count), count);
      value = load_first(total + i, count);
    }
    squares = fma(value, value, squares);
  }
  const F32 inverse = splat(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + args.eps));
  const T* source = residual == nullptr ? x : total;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = static_cast<int>(size - i < kLanes ? size - i : kLanes);
    T rounded[kLanes];
    store(rounded, load_first(source + i, count) * inverse);
    store_first(normed + i, load(rounded) * load_first(weight + i, count), count);
  }
}

OCTAVO_KERNEL(rms_norm, RmsNormArgs) {
  for (int64_t row = work.take(); row < work.num_rows; row = work.take()) {
    args.is_bf16 ? norm_row<bf16>(args, row) : norm_row<float>(args, row);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
