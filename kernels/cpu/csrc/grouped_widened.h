// Blocks widened to bfloat16 in front of the tile unit, a part of a panel at a time.
//
// Where there is AMX, its bfloat16 products are so fast that it pays to widen the weights for them: that serves all rows,
// and one row as well, so there is one way for any number of them. Activations stay as they are. Rejected: whole numbers
// in the tile unit, with activations of 12 bits: the sums of each 32 inputs have to be stored, scaled and added by the
// vector units, which took a quarter less time for one row, a quarter more for eight, and three times as much for many.
//
// A code becomes an fp32 number by being put into the mantissa of 1, where it happens to lie or after one shift; one
// fused multiplication and addition makes it the weight. That is grown by 3/1024 and cut off behind the 16 bits of a
// bfloat16, which is one of the two neighbours of the weight, the nearer one nearly always, and itself where it is a
// bfloat16; errors are 0 on average, as with rounding, which takes a third longer.
#pragma once

#if defined(OCTAVO_AMX)

#include "bf16_tiles.h"
#include "grouped_layout.h"

namespace octavo {
namespace OCTAVO_ISA {

static_assert(kGroupInputs == kInputsPerTile);

constexpr float kGrowth = 1.0f + 3.0f / 1024;
constexpr int kPairBytes = kPanelColumns * 2 * sizeof(bf16);  // a pair of inputs of all columns: a row of two tiles

// Makes weights of the numbers 1 + code · 2^(kBit - 23).
template <class Format, int kBit>
struct Widening {
  static constexpr float kUnit = 1 << (23 - kBit);

  __m512 scales, starts;

  Widening(const char* group, int half) {
    const auto head = [&](int index) {
      const F32 heads = load_halves(panel_head(group, index) + half * kLanes);
      return _mm512_mul_ps((__m512)heads, _mm512_set1_ps(kGrowth));
    };
    // With 15 bits, so that the product with the offset is exact and the code that stands for 0 gives 0.
    const __m512 steps = _mm512_and_ps(head(0), (__m512)_mm512_set1_epi32(~0x1ff));
    const __m512 offset = _mm512_set1_ps(-(kUnit + Format::kZeroCode));
    scales = _mm512_mul_ps(steps, _mm512_set1_ps(kUnit));
    if constexpr (Format::kHasMinimum) {
      starts = _mm512_fmadd_ps(steps, offset, head(1));
    } else {
      starts = _mm512_mul_ps(steps, offset);
    }
  }

  // The weights whose codes lie at bit kBit of the words.
  __m512i weights(__m512i words) const {
    constexpr int kCodeBits = Format::kWords == 8 ? 8 : 4, kAndOr = 0xea;
    const __m512i mask = _mm512_set1_epi32(((1 << kCodeBits) - 1) << kBit), one = _mm512_set1_epi32(0x3f800000);
    return (__m512i)_mm512_fmadd_ps((__m512)_mm512_ternarylogic_epi32(words, mask, one, kAndOr), scales, starts);
  }
};

// Stores the upper halves of two fp32 numbers in each lane, those of `low` first.
OCTAVO_INLINE void store_pair(char* to, __m512i low, __m512i high) {
  constexpr __mmask64 kLowHalves = 0x3333333333333333;
  _mm512_store_si512(to, _mm512_mask_alignr_epi8(high, kLowHalves, low, low, 2));
}

OCTAVO_INLINE void widen_4_bits(__m512i words, const auto& at_16, const auto& at_12, char* to) {
  const __m512i to_left = _mm512_slli_epi32(words, 8), to_right = _mm512_srli_epi32(words, 8);
  store_pair(to, at_16.weights(_mm512_slli_epi32(words, 16)), at_16.weights(to_left));
  store_pair(to + kPairBytes, at_16.weights(words), at_16.weights(to_right));
  to += 8 * kPairBytes;  // 16 inputs further
  store_pair(to, at_12.weights(to_left), at_12.weights(words));
  store_pair(to + kPairBytes, at_12.weights(to_right), at_16.weights(_mm512_srli_epi32(words, 12)));
}

OCTAVO_INLINE void widen_8_bits(__m512i words, const auto& at_15, char* to) {
  store_pair(to, at_15.weights(_mm512_slli_epi32(words, 15)), at_15.weights(_mm512_slli_epi32(words, 7)));
  store_pair(to + kPairBytes, at_15.weights(_mm512_srli_epi32(words, 1)), at_15.weights(_mm512_srli_epi32(words, 9)));
}

template <class Format>
OCTAVO_INLINE void widen_group(const char* group, char* to) {
  for (int half = 0; half < 2; half++, to += kVectorBytes) {
    const char* codes = panel_codes<Format>(group, half);
    const auto words = [&](int word) { return _mm512_loadu_si512(codes + word * kVectorBytes); };
    if constexpr (Format::kWords == 8) {
      const Widening<Format, 15> at_15(group, half);
#pragma GCC unroll 8
      for (int word = 0; word < 8; word++) widen_8_bits(words(word), at_15, to + 2 * word * kPairBytes);
    } else {
      const Widening<Format, 16> at_16(group, half);
      const Widening<Format, 12> at_12(group, half);
#pragma GCC unroll 4
      for (int word = 0; word < 4; word++) widen_4_bits(words(word), at_16, at_12, to + 2 * word * kPairBytes);
    }
  }
}

constexpr int kBlocksAheadBytes = 2048;

// The panels of a weight in blocks, as `compute_with_tiles` wants them.
template <class Format>
struct WidenedPanels {
  static constexpr bool kAsksAhead = true;
  static constexpr int64_t kStepsAlone = 3;  // whose weights leave room in the first-level cache for what they are made of
  static constexpr int64_t kHeldStepBytes = kPanelGroupBytes<Format>, kScratchBytes = kStepsPerPart * kStepBytes;

  const GroupedWeight& weight;

  const char* held(int64_t panel, int64_t step) const {
    return grouped_panel<Format>(weight, panel) + step * kPanelGroupBytes<Format>;
  }

  // Has the beginning of a panel on its way before `get` wants it.
  void ask_for(int64_t panel) const {
    const char* start = held(panel, 0);
    for (int byte = 0; byte < kBlocksAheadBytes; byte += 64) _mm_prefetch(start + byte, _MM_HINT_T1);
  }

  const char* get(int64_t panel, int64_t step, int64_t count, char* scratch) const {
    const char* group = held(panel, step);
    char* to = scratch;
    for (int64_t i = 0; i < count; i++, group += kPanelGroupBytes<Format>, to += kStepBytes) {
      for (int byte = 0; byte < kPanelGroupBytes<Format>; byte += 64) {
        _mm_prefetch(group + kBlocksAheadBytes + byte, _MM_HINT_T0);
      }
      widen_group<Format>(group, to);
    }
    return scratch;
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
