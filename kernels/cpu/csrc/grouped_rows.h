// Rounding of activations: each group of 32 numbers of a row to whole numbers up to 127 and a scale.
#pragma once

#include "grouped_layout.h"

namespace octavo {
namespace OCTAVO_ISA {

// Adding it rounds to a whole number, ties to even, which then stands in the low bits.
constexpr float kRounding = 12582912.0f;
// Below this a group counts as zero: its scale would be no normal number.
constexpr float kSmallest = 0x1p-100f;

OCTAVO_INLINE I32 larger(I32 a, I32 b) { return a > b ? a : b; }

// The largest magnitude; NaN or inf when one of the numbers is that, because their bits are the largest.
OCTAVO_INLINE float largest_magnitude(F32 first, F32 second) {
#if defined(OCTAVO_AVX512)
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i bits = _mm512_max_epi32(_mm512_and_si512((__m512i)first, magnitude),
                                        _mm512_and_si512((__m512i)second, magnitude));
  const int32_t most = _mm512_reduce_max_epi32(bits);
#else
  const I32 bits = larger((I32)first & 0x7fffffff, (I32)second & 0x7fffffff);
  int32_t most = 0;
  for (int i = 0; i < kLanes; i++) most = bits[i] > most ? bits[i] : most;
#endif
  float result;
  std::memcpy(&result, &most, sizeof result);
  return result;
}

OCTAVO_INLINE void store_low_bytes(int8_t* to, F32 rounded) {
#if defined(OCTAVO_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)rounded));
#else
  const I8 bytes = __builtin_convertvector((I32)rounded, I8);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

template <class T>
OCTAVO_INLINE void round_group(const T* x, int32_t zero_code, RowGroup& group, int row) {
  const F32 first = load(x), second = load(x + kLanes);
  const float most = largest_magnitude(first, second);
  const bool is_finite = most < INFINITY;
  // A NaN scale makes the whole row NaN, whatever the codes.
  const float inverse = is_finite && most >= kSmallest ? 127.0f / most : 0.0f;
  const float scale = !is_finite ? NAN : most >= kSmallest ? most / 127.0f : 0.0f;
  const F32 rounded_first = first * splat(inverse) + splat(kRounding);
  const F32 rounded_second = second * splat(inverse) + splat(kRounding);
  store_low_bytes(group.codes[row], rounded_first);
  store_low_bytes(group.codes[row] + kLanes, rounded_second);
  const float sum = reduce_add((rounded_first - splat(kRounding)) + (rounded_second - splat(kRounding)));
  group.scales[row] = scale;
  group.sums[row] = scale * sum;
  group.starts[row] = is_finite ? -zero_code * static_cast<int32_t>(sum) : 0;
}

OCTAVO_INLINE RowGroup* row_block(RowGroup* groups, int64_t row, int64_t num_groups) {
  return groups + row / kBlockRows * num_groups;
}

// A row of the activations, or a row of zeros beyond the last.
template <class T>
OCTAVO_INLINE void round_row(const T* x, int64_t row, int64_t num_rows, int64_t num_groups, int32_t zero_code,
                             RowGroup* groups) {
  const T zeros[kGroupInputs] = {};
  RowGroup* block = row_block(groups, row, num_groups);
  for (int64_t group = 0; group < num_groups; group++) {
    const T* from = row < num_rows ? x + (row * num_groups + group) * kGroupInputs : zeros;
    round_group(from, zero_code, block[group], static_cast<int>(row % kBlockRows));
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
