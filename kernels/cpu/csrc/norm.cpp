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

// One row takes less time than handing it to another thread.
constexpr int64_t kRowsAtOnce = 8;

constexpr int kChains = 4;

// Adds up squares in chains, so that one addition need not wait for the one before. A row is summed in the same order
// whether it is whole vectors or not.
struct Squares {
  F32 chains[kChains] = {};

  void add(int chain, F32 value) { chains[chain] = fma(value, value, chains[chain]); }
  float total() const { return reduce_add((chains[0] + chains[1]) + (chains[2] + chains[3])); }
};

// What is normed: x, or x + residual, which is also stored.
template <class T, bool kHasResidual>
OCTAVO_INLINE F32 sum_of(const T* x, const T* residual, T* total, int64_t i) {
  const F32 value = load(x + i);
  if constexpr (!kHasResidual) return value;
  const F32 sum = value + load(residual + i);
  store(total + i, sum);
  return round_to<T>(sum);
}

template <class T, bool kHasResidual>
OCTAVO_INLINE F32 sum_of_first(const T* x, const T* residual, T* total, int64_t i, int count) {
  const F32 value = load_first(x + i, count);
  if constexpr (!kHasResidual) return value;
  const F32 sum = value + load_first(residual + i, count);
  store_first(total + i, sum, count);
  return round_to<T>(sum);
}

template <class T, bool kHasResidual>
void norm_row(const RmsNormArgs& args, int64_t row) {
  const int64_t size = args.hidden_size, start = row * size, whole = size - size % kLanes;
  const int rest = static_cast<int>(size - whole);
  const T* x = static_cast<const T*>(args.x) + start;
  const T* residual = kHasResidual ? static_cast<const T*>(args.residual) + start : nullptr;
  const T* weight = static_cast<const T*>(args.weight);
  T* normed = static_cast<T*>(args.normed) + start;
  T* total = kHasResidual ? static_cast<T*>(args.total) + start : nullptr;

  Squares squares;
  int64_t i = 0;
  for (; i + kChains * kLanes <= whole; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; chain++) {
      squares.add(chain, sum_of<T, kHasResidual>(x, residual, total, i + chain * kLanes));
    }
  }
  int chain = 0;
  for (; i < whole; i += kLanes) squares.add(chain++, sum_of<T, kHasResidual>(x, residual, total, i));
  if (rest != 0) squares.add(chain, sum_of_first<T, kHasResidual>(x, residual, total, whole, rest));

  const F32 inverse = splat(1.0f / std::sqrt(squares.total() / static_cast<float>(size) + args.eps));
  const T* source = kHasResidual ? total : x;
  for (i = 0; i < whole; i += kLanes) {
    store(normed + i, round_to<T>(load(source + i) * inverse) * load(weight + i));
  }
  if (rest != 0) {
    const F32 scaled = round_to<T>(load_first(source + whole, rest) * inverse);
    store_first(normed + whole, scaled * load_first(weight + whole, rest), rest);
  }
}

template <class T>
void norm_rows(const RmsNormArgs& args, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; row++) {
    args.residual == nullptr ? norm_row<T, false>(args, row) : norm_row<T, true>(args, row);
  }
}

OCTAVO_KERNEL(rms_norm, RmsNormArgs) {
  for (int64_t first = work.take(kRowsAtOnce); first < work.num_rows; first = work.take(kRowsAtOnce)) {
    const int64_t end = first + kRowsAtOnce < work.num_rows ? first + kRowsAtOnce : work.num_rows;
    args.is_bf16 ? norm_rows<bf16>(args, first, end) : norm_rows<float>(args, first, end);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
