// Activations rounded to 12 bits, for CPUs with AMX, and products of few such rows with VNNI.
//
// An activation is 16 · high + low times a scale that 128 neighbouring inputs of a row share. The sum of a group is a
// whole number, which has no rounding: few rows find it with VNNI, many with the tile unit (`grouped_tiles.h`), and it is
// the same. Scaled by the weight's scales, four groups are added in their order, then scaled once more and added to the
// groups before them. Twelve bits leave the perplexity as it is, where eight cost a quarter of a percent; the tile unit
// takes no longer for them, because a row of a tile has room for both parts of an activation.
#pragma once

#if defined(OCTAVO_AMX)

#include "grouped_layout.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTurnGroups = 4;  // whose inputs share a scale, and which are multiplied before any is added
constexpr int kFineBytes = 2 * kGroupInputs;
constexpr float kLargestWhole = 2047.0f;
constexpr float kLeastMagnitude = 1e-30f;  // a row of smaller numbers counts as zeros

// A group of inputs of 16 rows.
struct FineGroup {
  int8_t parts[kBlockRows][kFineBytes];  // 32 high parts, -128 to 127, then 32 low ones, 0 to 15
  float sums[kBlockRows];                // of the whole numbers
  int32_t starts[kBlockRows];            // of the whole numbers, times what must be taken off each code of the weight
  float scales[kBlockRows];              // of the turn that the group is in
};

// The largest magnitude of up to 128 inputs, 0 if that is next to nothing; NaN when one is not finite, so that all
// results of the row are.
template <class T>
OCTAVO_INLINE float largest_of_turn(const T* x, int64_t num_inputs) {
  F32 most{}, faults{};
  for (int64_t i = 0; i < num_inputs; i += kLanes) {
    const F32 value = load(x + i);
    most = max((F32)((I32)value & 0x7fffffff), most);
    faults = fma(value, splat(0.0f), faults);  // NaN of what is not finite
  }
  const float fault = reduce_add(faults), largest = reduce_max(most);
  if (fault != fault) return NAN;
  return largest >= kLeastMagnitude ? largest : 0.0f;
}

template <class T>
OCTAVO_INLINE void round_finely(const T* x, int64_t row, int64_t num_groups, int32_t zero_code, FineGroup* groups) {
  FineGroup* block = groups + row / kBlockRows * num_groups;
  const int place = static_cast<int>(row % kBlockRows);
  const T* from = x + row * num_groups * kGroupInputs;
  float scale = 0, inverse = 0;
  for (int64_t group = 0; group < num_groups; group++, from += kGroupInputs) {
    if (group % kTurnGroups == 0) {
      const int64_t num_left = num_groups - group;
      const int64_t num_inputs = (num_left < kTurnGroups ? num_left : kTurnGroups) * kGroupInputs;
      const float largest = largest_of_turn(from, num_inputs);
      scale = largest / kLargestWhole;
      inverse = largest > 0 ? kLargestWhole / largest : 0.0f;
    }
    FineGroup& to = block[group];
    int32_t sum = 0;
    for (int half = 0; half < 2; half++) {
      const F32 scaled = load(from + half * kLanes) * splat(inverse);
      const __m512i whole = _mm512_cvtps_epi32((__m512)scaled), low = _mm512_and_si512(whole, _mm512_set1_epi32(15));
      auto* high_parts = reinterpret_cast<__m128i*>(to.parts[place] + half * kLanes);
      auto* low_parts = reinterpret_cast<__m128i*>(to.parts[place] + kGroupInputs + half * kLanes);
      _mm_storeu_si128(high_parts, _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 4)));
      _mm_storeu_si128(low_parts, _mm512_cvtepi32_epi8(low));
      sum += _mm512_reduce_add_epi32(whole);
    }
    to.sums[place] = static_cast<float>(sum);
    to.starts[place] = -zero_code * sum;
    to.scales[place] = scale;
  }
}

// The whole numbers of a group for 16 columns and some neighbouring rows, as fp32, which holds them exactly.
template <class Format, int kRows>
OCTAVO_INLINE void find_few(const FineGroup& x, int first, const char* codes, F32 (&result)[kRows]) {
  __m512i high[kRows], low[kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row++) {
    high[row] = _mm512_setzero_si512();
    low[row] = _mm512_set1_epi32(x.starts[first + row]);
  }
#pragma GCC unroll 8
  for (int word = 0; word < Format::kWords; word++) {
    const __m512i bytes = _mm512_loadu_si512(codes + word * kVectorBytes), mask = _mm512_set1_epi8(15);
    const __m512i first_codes = Format::kWords == 8 ? bytes : _mm512_and_si512(bytes, mask);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; row++) {
      const int8_t* parts = x.parts[first + row] + 4 * word;
      add_products(high[row], first_codes, parts);
      add_products(low[row], first_codes, parts + kGroupInputs);
    }
    if constexpr (Format::kWords == 4) {
      const __m512i second_codes = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) {
        const int8_t* parts = x.parts[first + row] + 4 * word + kGroupInputs / 2;
        add_products(high[row], second_codes, parts);
        add_products(low[row], second_codes, parts + kGroupInputs);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row++) {
    result[row] = (F32)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[row], 4), low[row]));
  }
}

constexpr int kFewAheadBytes = 4096;

// Sums of some neighbouring rows of a block for a panel.
template <class Format, int kRows>
OCTAVO_INLINE void multiply_few(const FineGroup* x, int first, const char* panel, int64_t num_groups,
                                F32 (&sums)[kRows][2]) {
  F32 parts[kRows][2] = {};
  for (int row = 0; row < kRows; row++) sums[row][0] = sums[row][1] = F32{};
  for (int64_t group = 0; group < num_groups; group++, panel += kPanelGroupBytes<Format>) {
    for (int i = 0; i < kPanelGroupBytes<Format>; i += 64) _mm_prefetch(panel + kFewAheadBytes + i, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      F32 found[kRows];
      find_few<Format, kRows>(x[group], first, panel_codes<Format>(panel, half), found);
      const F32 scales = load_halves(panel_head(panel, 0) + half * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) {
        F32& part = parts[row][half];
        part = fma(found[row], scales, part);
        if constexpr (Format::kHasMinimum) {
          const F32 minimums = load_halves(panel_head(panel, 1) + half * kLanes);
          part = fma(minimums, splat(x[group].sums[first + row]), part);
        }
      }
    }
    if (group % kTurnGroups == kTurnGroups - 1 || group + 1 == num_groups) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) {
        for (int half = 0; half < 2; half++) {
          sums[row][half] = fma(parts[row][half], splat(x[group].scales[first + row]), sums[row][half]);
          parts[row][half] = F32{};
        }
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
