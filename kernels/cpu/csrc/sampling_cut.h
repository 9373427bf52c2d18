// Which of a row's candidates stay: the likeliest ones up to a number, and up to a sum, found without a full sort.
//
// Positive fp32 numbers are ordered like their bits. So the last candidate that stays is looked for digit by digit,
// from the highest: all candidates are counted and summed by their digit, and only those that share the digit of the
// wanted one are looked at again, until they are few enough to be sorted.
#pragma once

#include <bit>

#include "row_scan.h"

namespace octavo {
namespace OCTAVO_ISA {

struct Limits {
  int64_t count;  // no more stay
  double sum;     // a candidate stays while the sum of those before it is below this
};

// Candidates above `value` stay, and `num_equal` of those that are equal to it.
struct Cut {
  float value;
  int64_t num_equal;
  double sum;  // of all that stay
};

constexpr int kDigitBits = 10;
constexpr int kNumDigits = 1 << kDigitBits;
constexpr int kFirstShift = 20;  // numbers up to 1 have 30 bits
constexpr int64_t kFewEnough = 64;

OCTAVO_INLINE int digit_of(float value, int shift) {
  return static_cast<int>((std::bit_cast<uint32_t>(value) >> shift) % kNumDigits);
}

struct Kept {
  int64_t count = 0;
  double sum = 0;
};

// Takes numbers from the highest digit on while all of a digit stay for certain; returns the first digit that is not
// taken, at the latest the lowest that there is.
OCTAVO_INLINE int take_digits(const float* values, int64_t num_values, int shift, const Limits& limits, Kept& taken) {
  Kept digits[kNumDigits];
  int lowest = kNumDigits - 1;
  for (int64_t i = 0; i < num_values; i++) {
    const int digit = digit_of(values[i], shift);
    digits[digit].count++;
    digits[digit].sum += values[i];
    lowest = std::min(lowest, digit);
  }
  for (int digit = kNumDigits - 1; digit > lowest; digit--) {
    const Kept with = {taken.count + digits[digit].count, taken.sum + digits[digit].sum};
    if (with.count >= limits.count || with.sum >= limits.sum) return digit;
    taken = with;
  }
  return lowest;
}

// Takes equal or sorted numbers one by one, at least the first.
OCTAVO_INLINE Cut take_singly(const float* values, int64_t num_values, const Limits& limits, Kept taken) {
  Cut cut = {values[0], 0, taken.sum};
  for (int64_t i = 0; i < num_values; i++) {
    if (i > 0 && (taken.count + i >= limits.count || cut.sum >= limits.sum)) break;
    cut.num_equal = values[i] == cut.value ? cut.num_equal + 1 : 1;
    cut.value = values[i];
    cut.sum += values[i];
  }
  return cut;
}

// `values` are positive and up to 1, at least one, and limits at least one and above 0. They are overwritten.
OCTAVO_INLINE Cut find_cut(float* values, int64_t num_values, const Limits& limits) {
  Kept taken;
  for (int shift = kFirstShift; shift >= 0 && num_values > kFewEnough; shift -= kDigitBits) {
    const int wanted = take_digits(values, num_values, shift, limits, taken);
    int64_t num_left = 0;
    for (int64_t i = 0; i < num_values; i++) {
      const float value = values[i];
      values[num_left] = value;
      num_left += digit_of(value, shift) == wanted;
    }
    num_values = num_left;
  }
  if (num_values <= kFewEnough) std::sort(values, values + num_values, std::greater<float>());
  return take_singly(values, num_values, limits, taken);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
