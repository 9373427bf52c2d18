// The products of gated feed-forward layers: activation(gate) · up.

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct GatedArgs {
  const void* gate_up;  // [rows, 2 · size]; the gates of a row, then what they gate
  void* product;        // [rows, size]
  int64_t size;
  int64_t is_bf16;
};

struct Silu {
  static F32 of(F32 gate) { return gate / (splat(1.0f) + exp(-gate)); }
};

// With the tanh approximation (Hendrycks and Gimpel 2016): (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
struct Gelu {
  static F32 of(F32 gate) {
    const F32 inner = fma(gate * gate * gate, splat(0.044715f), gate) * splat(0.7978845608f);
    return gate / (splat(1.0f) + exp(inner * splat(-2.0f)));
  }
};

template <class T, class Activation>
void multiply_row(const GatedArgs& args, int64_t row) {
  const int64_t size = args.size, whole = size - size % kLanes;
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * size;
  const T* up = gate + size;
  T* product = static_cast<T*>(args.product) + row * size;
  for (int64_t i = 0; i < whole; i += kLanes) {
    store(product + i, round_to<T>(Activation::of(load(gate + i))) * load(up + i));
  }
  const int rest = static_cast<int>(size - whole);
  if (rest != 0) {
    const F32 activated = round_to<T>(Activation::of(load_first(gate + whole, rest)));
    store_first(product + whole, activated * load_first(up + whole, rest), rest);
  }
}

template <class Activation>
void multiply(const GatedArgs& args, Work& work) {
  for (int64_t row = work.take(); row < work.num_rows; row = work.take()) {
    args.is_bf16 ? multiply_row<bf16, Activation>(args, row) : multiply_row<float, Activation>(args, row);
  }
}

OCTAVO_KERNEL(silu_mul, GatedArgs) { multiply<Silu>(args, work); }

OCTAVO_KERNEL(gelu_mul, GatedArgs) { multiply<Gelu>(args, work); }

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
