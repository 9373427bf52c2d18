// Dense products with vector instructions: a few rows at a time, whose sums stay in registers while a panel passes.
//
// Each sum is one chain over the inputs, in their order, whatever the number of rows. fp32 sums of bfloat16 weights
// widen both factors; with AVX512_BF16 a pair of products is added at a time (VDPBF16PS).
#pragma once

#include "dense_layout.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

// Registers of the machine, and how many rows and columns have their sums in them. A row's columns are done in passes.
#if defined(OCTAVO_AVX512)
constexpr int kRegisterLanes = 16, kColumnRegisters = 2, kMaxRows = 12;
#elif defined(OCTAVO_AVX2)
constexpr int kRegisterLanes = 8, kColumnRegisters = 2, kMaxRows = 6;
#else
constexpr int kRegisterLanes = 4, kColumnRegisters = 2, kMaxRows = 4;
#endif
constexpr int kPassColumns = kRegisterLanes * kColumnRegisters;

typedef float Register __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kRegisterLanes)));

OCTAVO_INLINE Register register_at(const void* from) {
  Register value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

OCTAVO_INLINE Register multiply_add(float x, Register weights, Register sums) {
  const Register factor = x - Register{};
#if defined(OCTAVO_AVX512)
  return (Register)_mm512_fmadd_ps((__m512)factor, (__m512)weights, (__m512)sums);
#elif defined(OCTAVO_AVX2)
  return (Register)_mm256_fmadd_ps((__m256)factor, (__m256)weights, (__m256)sums);
#else
  return factor * weights + sums;
#endif
}

// Factors of one step: fp32 weights of one input.
struct Fp32Step {
  typedef float X;
  static constexpr int kInputs = 1;

  template <int kRows>
  OCTAVO_INLINE void run(const float* x, int64_t stride, const char* weights,
                         Register (&sums)[kRows][kColumnRegisters]) {
    Register factors[kColumnRegisters];
    for (int c = 0; c < kColumnRegisters; c++) factors[c] = register_at(weights + c * sizeof(Register));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      for (int c = 0; c < kColumnRegisters; c++) sums[row][c] = multiply_add(x[row * stride], factors[c], sums[row][c]);
    }
  }
};

// bfloat16 weights of two inputs, widened: the first is the low half of each 32 bits.
struct WidenedStep {
  typedef float X;
  static constexpr int kInputs = 2;

  template <int kRows>
  OCTAVO_INLINE void run(const float* x, int64_t stride, const char* weights,
                         Register (&sums)[kRows][kColumnRegisters]) {
    Register low[kColumnRegisters], high[kColumnRegisters];
    for (int c = 0; c < kColumnRegisters; c++) {
      const Bits pairs = (Bits)register_at(weights + c * sizeof(Register));
      low[c] = (Register)(pairs << 16);
      high[c] = (Register)(pairs & 0xffff0000u);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      for (int c = 0; c < kColumnRegisters; c++) sums[row][c] = multiply_add(x[row * stride], low[c], sums[row][c]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      for (int c = 0; c < kColumnRegisters; c++) sums[row][c] = multiply_add(x[row * stride + 1], high[c], sums[row][c]);
    }
  }
};

#if defined(OCTAVO_AVX512_BF16)
// bfloat16 weights of two inputs. The broadcast goes to one register by hand, because the compiler would load those
// of all rows first and then have no registers left for the sums.
struct PairStep {
  typedef bf16 X;
  static constexpr int kInputs = 2;

  template <int kRows>
  OCTAVO_INLINE void run(const bf16* x, int64_t stride, const char* weights,
                         Register (&sums)[kRows][kColumnRegisters]) {
    const Register first = register_at(weights), second = register_at(weights + sizeof(Register));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; row++) {
      asm("vpbroadcastd %2, %%zmm31\n\tvdpbf16ps %3, %%zmm31, %0\n\tvdpbf16ps %4, %%zmm31, %1"
          : "+v"(sums[row][0]), "+v"(sums[row][1])
          : "m"(*reinterpret_cast<const int32_t(*)>(x + row * stride)), "v"(first), "v"(second)
          : "xmm31");
    }
  }
};
typedef PairStep Bf16Step;
#else
typedef WidenedStep Bf16Step;
#endif

template <class Step, int kRows>
void multiply_rows(const typename Step::X* x, int64_t stride, const char* panel, int64_t num_inputs, float* to) {
  constexpr int kStepBytes = kPanelColumns * 4;
  for (int pass = 0; pass < kPanelColumns; pass += kPassColumns) {
    Register sums[kRows][kColumnRegisters] = {};
    const char* weights = panel + pass * 4;
    for (int64_t k = 0; k < num_inputs; k += Step::kInputs, weights += kStepBytes) {
      if (pass == 0) prefetch(weights, kStepBytes);
      Step::template run<kRows>(x + k, stride, weights, sums);
    }
    for (int row = 0; row < kRows; row++) {
      std::memcpy(to + row * kPanelColumns + pass, &sums[row], sizeof sums[row]);
    }
  }
}

// multiply_rows for a number of rows that is known at run time.
template <class Step, int kRows = kMaxRows>
void multiply(int num_rows, const typename Step::X* x, int64_t stride, const char* panel, int64_t num_inputs,
              float* to) {
  if (num_rows == kRows) return multiply_rows<Step, kRows>(x, stride, panel, num_inputs, to);
  if constexpr (kRows > 1) multiply<Step, kRows - 1>(num_rows, x, stride, panel, num_inputs, to);
}

// Rows of x as the step reads them: where they are, or a copy in scratch; null after a failure.
template <class Step>
const typename Step::X* rows_for_steps(const DenseLinearArgs& args, Work& work, int64_t first_row, int num_rows) {
  typedef typename Step::X X;
  const int64_t num_inputs = args.weight.num_inputs, start = first_row * num_inputs;
  const int64_t num_padded = divide_up(num_inputs, Step::kInputs) * Step::kInputs;
  const bool is_same = args.x_is_bf16 == (sizeof(X) == sizeof(bf16));
  if (is_same && num_padded == num_inputs) return static_cast<const X*>(args.x) + start;
  X* copy = static_cast<X*>(work.scratch(num_rows * num_padded * sizeof(X)));
  for (int row = 0; row < num_rows && copy != nullptr; row++) {
    X* to = copy + row * num_padded;
    const int64_t from = start + row * num_inputs;
    if (args.x_is_bf16) {
      copy_row(to, static_cast<const bf16*>(args.x) + from, num_inputs, num_padded);
    } else {
      copy_row(to, static_cast<const float*>(args.x) + from, num_inputs, num_padded);
    }
  }
  return copy;
}

template <class Step>
void compute_with(const DenseLinearArgs& args, Work& work, const Item& item) {
  alignas(64) float sums[kMaxRows * kPanelColumns];
  const int64_t num_padded = divide_up(args.weight.num_inputs, Step::kInputs) * Step::kInputs;
  for (int64_t first_row = item.first_row; first_row < item.end_row; first_row += kMaxRows) {
    const int num_rows = static_cast<int>(item.end_row - first_row < kMaxRows ? item.end_row - first_row : kMaxRows);
    const typename Step::X* x = rows_for_steps<Step>(args, work, first_row, num_rows);
    if (x == nullptr) return;
    for (int64_t panel = item.first_panel; panel < item.end_panel; panel++) {
      multiply<Step>(num_rows, x, num_padded, panel_of(args.weight, panel), num_padded, sums);
      for (int row = 0; row < num_rows; row++) {
        const float* from = sums + row * kPanelColumns;
        finish_row(args.output, first_row + row, panel, load(from), load(from + kLanes));
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
