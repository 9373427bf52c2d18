// How weights of GGUF blocks lie in their panels, how activations lie beside them, and what the kernels are given.
//
// A panel holds, for each group of 32 inputs, the fp16 scales of its 32 columns, their fp16 minimums where the format has
// some, and the codes: vectors of 16 columns · 4 neighbouring inputs, which is what one instruction multiplies. A vector
// of 4-bit codes has 4 inputs in the low halves of its bytes and the 4 that are 16 inputs further in the high halves, as
// a block of the file has them; so packing moves words of 4 bytes and changes none. Codes of 8 bits are stored + 128,
// because that instruction wants them without a sign. A panel is as large as its blocks in the file.
#pragma once

#include "item_split.h"
#include "linear_parts.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kGroupInputs = 32;
constexpr int kBlockRows = 16;  // rows of activations that lie together

struct Q8_0 {
  static constexpr bool kHasMinimum = false;
  static constexpr int kWords = 8;       // of 4 bytes with codes, in a block
  static constexpr int kZeroCode = 128;  // what a weight of 0 is stored as
};
struct Q4_0 {
  static constexpr bool kHasMinimum = false;
  static constexpr int kWords = 4;
  static constexpr int kZeroCode = 8;
};
struct Q4_1 {
  static constexpr bool kHasMinimum = true;
  static constexpr int kWords = 4;
  static constexpr int kZeroCode = 0;
};

constexpr int kVectorBytes = 4 * kLanes;

template <class Format>
constexpr int kHeads = Format::kHasMinimum ? 2 : 1;  // fp16 numbers of a block
template <class Format>
constexpr int kFileBlockBytes = 2 * kHeads<Format> + 4 * Format::kWords;
template <class Format>
constexpr int kPanelGroupBytes = kPanelColumns * kFileBlockBytes<Format>;
template <class Format>
constexpr int kHalfCodeBytes = Format::kWords * kVectorBytes;  // codes of 16 columns

struct GroupedWeight {
  void* panels;
  int64_t num_outputs;
  int64_t num_inputs;  // whole groups
  int64_t is_gated;
  int64_t format;  // a WeightKind
};

enum WeightKind : int64_t { kQ8_0 = 0, kQ4_0 = 1, kQ4_1 = 2 };

// Calls `action` with a value of the weight's format.
template <class Action>
OCTAVO_INLINE void with_format(const GroupedWeight& weight, Action&& action) {
  if (weight.format == kQ8_0) {
    action(Q8_0{});
  } else if (weight.format == kQ4_0) {
    action(Q4_0{});
  } else {
    action(Q4_1{});
  }
}

template <class Format>
OCTAVO_INLINE char* grouped_panel(const GroupedWeight& weight, int64_t panel) {
  return static_cast<char*>(weight.panels) + panel * (weight.num_inputs / kGroupInputs) * kPanelGroupBytes<Format>;
}

// The scales or minimums of a group of a panel, and its codes of columns 0 to 15 or 16 to 31.
OCTAVO_INLINE const uint16_t* panel_head(const char* group, int index) {
  return reinterpret_cast<const uint16_t*>(group) + index * kPanelColumns;
}
template <class Format>
OCTAVO_INLINE const char* panel_codes(const char* group, int half) {
  return group + kHeads<Format> * kPanelColumns * sizeof(uint16_t) + half * kHalfCodeBytes<Format>;
}

// How a product is shared out; a row of x takes `row_bytes`.
template <class Format>
OCTAVO_INLINE Split split_of(const GroupedWeight& weight, int64_t row_bytes, const Work& work) {
  const int64_t panel_bytes = weight.num_inputs / kGroupInputs * kPanelGroupBytes<Format>;
  return Split(num_panels(weight.num_outputs, weight.is_gated), panel_bytes, work.num_rows, row_bytes,
               work.num_threads());
}

// A group of inputs of 16 rows, rounded to whole numbers from -127 to 127.
struct RowGroup {
  int8_t codes[kBlockRows][kGroupInputs];
  float scales[kBlockRows];
  float sums[kBlockRows];      // of the codes, times the scale
  int32_t starts[kBlockRows];  // of the codes, times what must be taken off each code of the weight
};

// fp16 numbers, widened.
OCTAVO_INLINE F32 load_halves(const uint16_t* from) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(OCTAVO_AVX2)
  return join((F32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
              (F32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8))));
#else
  U16 halves;
  std::memcpy(&halves, from, sizeof halves);
  const U32 bits = __builtin_convertvector(halves, U32);
  const U32 size = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const F32 scaled = (F32)size * splat(0x1p112f);  // exact below the largest exponent, which stands for inf and NaN
  const I32 is_special = (I32)(size >= 0x0f800000u);
  return (F32)((U32)select(is_special, (F32)(size | 0x7f800000u), scaled) | sign);
#endif
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
