// Products of a block of rows with a panel: sums of a group in whole numbers, which have no rounding, and their addition.
//
// All instruction sets find the same whole numbers, and add them in the same order with the same roundings (except
// `portable`, where a fused multiplication and addition rounds twice), so their results have the same bits.
#pragma once

#include "grouped_rows.h"

namespace octavo {
namespace OCTAVO_ISA {

// A group of inputs of `kRows` neighbouring rows of a block.
struct RowsOfGroup {
  RowsOfGroup(const RowGroup& group, int first)
      : codes(group.codes + first), scales(group.scales + first), sums(group.sums + first),
        starts(group.starts + first) {}

  const int8_t (*codes)[kGroupInputs];
  const float* scales;
  const float* sums;
  const int32_t* starts;
};

#if defined(OCTAVO_AVX512)

// The 4 inputs of a row go to all columns from memory; the compiler would keep them in registers that it does not have.
OCTAVO_INLINE void add_products(__m512i& sum, __m512i codes, const int8_t* inputs) {
  asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const int32_t(*)>(inputs)), "v"(codes));
}

// Sums of a group for 16 columns: of (code - zero code) · input.
template <class Format, int kRows>
OCTAVO_INLINE void find_whole_sums(const RowsOfGroup& x, const char* codes, F32 (&result)[kRows]) {
  __m512i sums[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) sums[row] = _mm512_set1_epi32(x.starts[row]);
#pragma GCC unroll 8
  for (int word = 0; word < Format::kWords; word++) {
    const __m512i bytes = _mm512_loadu_si512(codes + word * kVectorBytes);
    if constexpr (Format::kWords == 8) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) add_products(sums[row], bytes, x.codes[row] + 4 * word);
    } else {
      const __m512i low_mask = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(bytes, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_mask);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) add_products(sums[row], low, x.codes[row] + 4 * word);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) add_products(sums[row], high, x.codes[row] + 4 * word + 16);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) result[row] = (F32)_mm512_cvtepi32_ps(sums[row]);
}

#elif defined(OCTAVO_AVX2)

OCTAVO_INLINE __m256i broadcast_inputs(const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return _mm256_set1_epi32(four);
}

// Sums of pairs of 8-bit products, which do not saturate: 4-bit codes are small, and of codes with a sign the magnitude
// is multiplied, 128 · 127 · 2 at most.
template <class Format, int kRows>
OCTAVO_INLINE void whole_sums_of_eight(const RowsOfGroup& x, const char* codes, __m256i (&sums)[kRows]) {
  const __m256i ones = _mm256_set1_epi16(1), low_mask = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128);
  for (int row = 0; row < kRows; row++) sums[row] = _mm256_setzero_si256();
  for (int word = 0; word < Format::kWords; word++) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + word * kVectorBytes));
    if constexpr (Format::kWords == 8) {
      const __m256i weights = _mm256_xor_si256(bytes, flip), magnitudes = _mm256_abs_epi8(weights);
      for (int row = 0; row < kRows; row++) {
        const __m256i inputs = _mm256_sign_epi8(broadcast_inputs(x.codes[row] + 4 * word), weights);
        sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, inputs), ones));
      }
    } else {
      const __m256i low = _mm256_and_si256(bytes, low_mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_mask);
      for (int row = 0; row < kRows; row++) {  // 16 products of 15 · 127 fit in 16 bits
        const __m256i first = _mm256_maddubs_epi16(low, broadcast_inputs(x.codes[row] + 4 * word));
        const __m256i second = _mm256_maddubs_epi16(high, broadcast_inputs(x.codes[row] + 4 * word + 16));
        sums[row] = _mm256_add_epi16(sums[row], _mm256_add_epi16(first, second));
      }
    }
  }
  if constexpr (Format::kWords == 4) {
    for (int row = 0; row < kRows; row++) {
      const __m256i start = _mm256_set1_epi32(x.starts[row]);
      sums[row] = _mm256_add_epi32(_mm256_madd_epi16(sums[row], ones), start);
    }
  }
}

template <class Format, int kRows>
OCTAVO_INLINE void find_whole_sums(const RowsOfGroup& x, const char* codes, F32 (&result)[kRows]) {
  __m256i sums[2][kRows];
  for (int half = 0; half < 2; half++) whole_sums_of_eight<Format, kRows>(x, codes + half * 32, sums[half]);
  for (int row = 0; row < kRows; row++) {
    result[row] = join((F32x8)_mm256_cvtepi32_ps(sums[0][row]), (F32x8)_mm256_cvtepi32_ps(sums[1][row]));
  }
}

#else

// In fp32, which holds these whole numbers (below 2^20) and has a quick multiplication everywhere.
template <class Format, int kRows>
OCTAVO_INLINE void find_whole_sums(const RowsOfGroup& x, const char* codes, F32 (&result)[kRows]) {
  for (int row = 0; row < kRows; row++) result[row] = splat(static_cast<float>(x.starts[row]));
  constexpr int kCodeBits = Format::kWords == 8 ? 8 : 4;
  for (int word = 0; word < Format::kWords; word++) {
    U32 columns;
    std::memcpy(&columns, codes + word * kVectorBytes, sizeof columns);
    for (int shift = 0; shift < 32; shift += kCodeBits) {
      const F32 weights = __builtin_convertvector((I32)((columns >> shift) & ((1 << kCodeBits) - 1)), F32);
      const int input = 4 * word + shift / 8 + (shift % 8 == 0 ? 0 : 16);
      for (int row = 0; row < kRows; row++) result[row] += weights * splat(static_cast<float>(x.codes[row][input]));
    }
  }
}

#endif

// Adds a group to the sums of 16 columns.
template <class Format, int kRows>
OCTAVO_INLINE void add_group(const RowsOfGroup& x, const F32 (&whole)[kRows], F32 scales, F32 minimums, int half,
                             F32 (&sums)[kRows][2]) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
    F32& sum = sums[row][half];
    sum = fma(whole[row] * scales, splat(x.scales[row]), sum);
    if constexpr (Format::kHasMinimum) sum = fma(minimums, splat(x.sums[row]), sum);
  }
}

constexpr int kPanelPrefetchBytes = 4096;

// The sums of `kRows` rows of a block, from `first` on, for columns 0 to 15 and 16 to 31 of a panel.
template <class Format, int kRows>
OCTAVO_INLINE void multiply_rows(const RowGroup* x, int first, const char* panel, int64_t num_groups,
                                 F32 (&to)[kRows][2]) {
  F32 sums[kRows][2] = {};
  for (int64_t group = 0; group < num_groups; group++, panel += kPanelGroupBytes<Format>) {
    if constexpr (kRows <= 4) {
      for (int i = 0; i < kPanelGroupBytes<Format>; i += 64) __builtin_prefetch(panel + kPanelPrefetchBytes + i, 0, 3);
    }
    const RowsOfGroup rows(x[group], first);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      F32 whole[kRows];
      find_whole_sums<Format, kRows>(rows, panel_codes<Format>(panel, half), whole);
      const F32 scales = load_halves(panel_head(panel, 0) + half * kLanes);
      const F32 minimums = Format::kHasMinimum ? load_halves(panel_head(panel, 1) + half * kLanes) : F32{};
      add_group<Format, kRows>(rows, whole, scales, minimums, half, sums);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
    to[row][0] = sums[row][0];
    to[row][1] = sums[row][1];
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
