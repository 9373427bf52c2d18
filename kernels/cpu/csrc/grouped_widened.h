// Blocks widened to bfloat16 in front of the tile unit, a part of a panel at a time.
//
// Where there is AMX, its bfloat16 products are so fast that it pays to widen the weights for them, even for one row:
// widening a part takes about as long as reading it from memory, and then it serves all rows. Each weight is the number
// that its block means, rounded to bfloat16, and activations stay as they are; so the result has the bits of the same
// weights held as bfloat16. Rejected: whole numbers in the tile unit (sums of 32 inputs have to be stored, scaled and
// added by the vector units, which bounds it to a quarter of this speed at many rows).
#pragma once

#if defined(OCTAVO_AMX)

#include "bf16_tiles.h"
#include "grouped_layout.h"

namespace octavo {
namespace OCTAVO_ISA {

static_assert(kGroupInputs == kInputsPerTile);

// Scales of 16 columns, and what a code of 0 means.
struct Widening {
  __m512 scales, zeros;
};

template <class Format>
OCTAVO_INLINE Widening widening_of(const char* group, int half) {
  const __m512 scales = (__m512)load_halves(panel_head(group, 0) + half * kLanes);
  if constexpr (Format::kHasMinimum) {
    return {scales, (__m512)load_halves(panel_head(group, 1) + half * kLanes)};
  } else {
    return {scales, _mm512_mul_ps(scales, _mm512_set1_ps(-Format::kZeroCode))};
  }
}

// The codes of input `kInput` of the four, in the low or high halves of their bytes, as fp32.
template <int kShift>
OCTAVO_INLINE __m512 four_bit_codes(__m512i words) {
  const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_permutexvar_ps(kShift == 0 ? words : _mm512_srli_epi32(words, kShift), numbers);  // looks at 4 bits
}
template <int kShift>
OCTAVO_INLINE __m512 eight_bit_codes(__m512i words) {
  const __m512i shifted = kShift == 0 ? words : _mm512_srli_epi32(words, kShift);
  return _mm512_cvtepi32_ps(kShift == 24 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi32(255)));
}

// Stores a pair of inputs of 16 columns as a row of a tile.
OCTAVO_INLINE void store_pair(char* to, __m512 even, __m512 odd, const Widening& widening) {
  const __m512 low = _mm512_fmadd_ps(even, widening.scales, widening.zeros);
  const __m512 high = _mm512_fmadd_ps(odd, widening.scales, widening.zeros);
  alignas(64) static constexpr uint16_t kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), rounded));
}

template <class Format>
OCTAVO_INLINE void widen_group(const char* group, char* to) {
  constexpr int kPairBytes = kPanelColumns * 2 * sizeof(bf16);
  for (int half = 0; half < 2; half++) {
    const Widening widening = widening_of<Format>(group, half);
    const char* codes = panel_codes<Format>(group, half);
    char* pairs = to + half * kVectorBytes;
#pragma GCC unroll 8
    for (int word = 0; word < Format::kWords; word++) {
      const __m512i words = _mm512_loadu_si512(codes + word * kVectorBytes);
      char* pair = pairs + 2 * word * kPairBytes;
      if constexpr (Format::kWords == 8) {
        store_pair(pair, eight_bit_codes<0>(words), eight_bit_codes<8>(words), widening);
        store_pair(pair + kPairBytes, eight_bit_codes<16>(words), eight_bit_codes<24>(words), widening);
      } else {
        store_pair(pair, four_bit_codes<0>(words), four_bit_codes<8>(words), widening);
        store_pair(pair + kPairBytes, four_bit_codes<16>(words), four_bit_codes<24>(words), widening);
        pair += 8 * kPairBytes;  // 16 inputs further
        store_pair(pair, four_bit_codes<4>(words), four_bit_codes<12>(words), widening);
        store_pair(pair + kPairBytes, four_bit_codes<20>(words), four_bit_codes<28>(words), widening);
      }
    }
  }
}

constexpr int kBlocksAheadBytes = 4096;

// Where the tiles of a weight in blocks come from.
template <class Format>
struct WidenedPanels {
  static constexpr bool kStreams = false;
  static constexpr int64_t kScratchBytes = kStepsPerPart * kStepBytes;

  const GroupedWeight& weight;

  const char* get(int64_t panel, int64_t step, int64_t count, char* scratch) const {
    const char* group = grouped_panel<Format>(weight, panel) + step * kPanelGroupBytes<Format>;
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
