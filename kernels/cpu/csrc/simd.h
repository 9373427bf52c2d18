// Vectors of 16 fp32 numbers, on every instruction set: where registers are narrower, the compiler splits them.
//
// So sums have one order whatever the machine. Products and sums are fused only where `fma` says so (the compiler must
// not decide that: two copies of an inlined function could differ in the last bit); without FMA instructions it rounds
// twice. bfloat16 numbers are held as their 16 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(OCTAVO_AVX2)
// GCC 12 warns of the undefined lanes that its own header means to leave undefined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kLanes = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef int8_t I8 __attribute__((vector_size(16)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef float F32x4 __attribute__((vector_size(16)));
typedef double F64x8 __attribute__((vector_size(64)));

struct bf16 {
  uint16_t bits;
};

OCTAVO_INLINE F32x8 low_half(F32 value) { return __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7); }
OCTAVO_INLINE F32x8 high_half(F32 value) {
  return __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
}
OCTAVO_INLINE F32 join(F32x8 low, F32x8 high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

OCTAVO_INLINE F32 splat(float value) { return value - F32{}; }

OCTAVO_INLINE float to_float(float value) { return value; }
OCTAVO_INLINE float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

OCTAVO_INLINE F32 widen(U16 bits) {
#if defined(OCTAVO_AVX512)
  // Each number to the upper half of its lane: one instruction instead of two.
  const __m512i places = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000,
                                          0x70000, 0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
  return (F32)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, _mm512_castsi256_si512((__m256i)bits));
#elif defined(OCTAVO_AVX2) && !defined(OCTAVO_AVX512)
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)bits));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)bits, 1));
  return join((F32x8)_mm256_slli_epi32(low, 16), (F32x8)_mm256_slli_epi32(high, 16));
#else
  return (F32)(__builtin_convertvector(bits, U32) << 16);
#endif
}

// To the nearest bfloat16, ties to even; NaN stays NaN. Numbers below 2^-126 may become 0.
OCTAVO_INLINE U16 narrow(F32 value) {
#if defined(OCTAVO_AVX512_BF16)
  return (U16)_mm512_cvtneps_pbh((__m512)value);
#elif defined(OCTAVO_AVX512)
  const __m512i bits = _mm512_castps_si512((__m512)value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return (U16)_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#elif defined(OCTAVO_AVX2)
  __m256i halves[2] = {(__m256i)low_half(value), (__m256i)high_half(value)};
  for (__m256i& bits : halves) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 is_nan = _mm256_cmp_ps((__m256)bits, (__m256)bits, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    bits = _mm256_srli_epi32((__m256i)_mm256_blendv_ps((__m256)rounded, (__m256)quiet, is_nan), 16);
  }
  return (U16)_mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
#else
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 is_nan = (U32)(value != value);
  return __builtin_convertvector((rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan), U16);
#endif
}

OCTAVO_INLINE F32 load(const float* from) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_loadu_ps(from);
#else
  F32x8 low, high;
  std::memcpy(&low, from, sizeof low);
  std::memcpy(&high, from + 8, sizeof high);
  return join(low, high);
#endif
}
OCTAVO_INLINE F32 load(const bf16* from) {
  U16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return widen(bits);
}
OCTAVO_INLINE void store(float* to, F32 value) {
#if defined(OCTAVO_AVX512)
  _mm512_storeu_ps(to, (__m512)value);
#else
  const F32x8 low = low_half(value), high = high_half(value);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + 8, &high, sizeof high);
#endif
}
OCTAVO_INLINE void store(bf16* to, F32 value) {
  const U16 bits = narrow(value);
  std::memcpy(to, &bits, sizeof bits);
}

// What `store` to a T and `load` again would give.
template <class T>
OCTAVO_INLINE F32 round_to(F32 value);
template <>
inline __attribute__((always_inline)) F32 round_to<float>(F32 value) {
  return value;
}
template <>
inline __attribute__((always_inline)) F32 round_to<bf16>(F32 value) {
  return widen(narrow(value));
}

// The first `count` of 16 numbers, 0 to 16; the others are 0, and are not read or written.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }
OCTAVO_INLINE F32 load_first(const float* from, int count) {
  return (F32)_mm512_maskz_loadu_ps(first_lanes(count), from);
}
OCTAVO_INLINE F32 load_first(const bf16* from, int count) {
  return widen((U16)_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
OCTAVO_INLINE void store_first(float* to, F32 value, int count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)value);
}
OCTAVO_INLINE void store_first(bf16* to, F32 value, int count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)narrow(value));
}
#else
template <class T>
OCTAVO_INLINE F32 load_first(const T* from, int count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, count * sizeof(T));
  return load(buffer);
}
template <class T>
OCTAVO_INLINE void store_first(T* to, F32 value, int count) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(to, buffer, count * sizeof(T));
}
#endif

OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OCTAVO_AVX2)
  return join((F32x8)_mm256_fmadd_ps((__m256)low_half(a), (__m256)low_half(b), (__m256)low_half(c)),
              (F32x8)_mm256_fmadd_ps((__m256)high_half(a), (__m256)high_half(b), (__m256)high_half(c)));
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE F32 select(I32 condition, F32 yes, F32 no) { return condition ? yes : no; }

// a where a > b (a < b), else b: so b when one of them is NaN.
OCTAVO_INLINE F32 max(F32 a, F32 b) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
  return join((F32x8)_mm256_max_ps((__m256)low_half(a), (__m256)low_half(b)),
              (F32x8)_mm256_max_ps((__m256)high_half(a), (__m256)high_half(b)));
#else
  return select(a > b, a, b);
#endif
}
OCTAVO_INLINE F32 min(F32 a, F32 b) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
  return join((F32x8)_mm256_min_ps((__m256)low_half(a), (__m256)low_half(b)),
              (F32x8)_mm256_min_ps((__m256)high_half(a), (__m256)high_half(b)));
#else
  return select(a < b, a, b);
#endif
}

// 0 where value < limit, else the value; neither is NaN.
OCTAVO_INLINE F32 zero_below(F32 value, F32 limit) {
#if defined(OCTAVO_AVX512)
  const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)value, (__m512)limit, _CMP_GE_OQ);
  return (F32)_mm512_maskz_mov_ps(is_kept, (__m512)value);
#elif defined(OCTAVO_AVX2)
  const __m256 low = (__m256)low_half(value), high = (__m256)high_half(value);
  const __m256 is_low_kept = _mm256_cmp_ps(low, (__m256)low_half(limit), _CMP_GE_OQ);
  const __m256 is_high_kept = _mm256_cmp_ps(high, (__m256)high_half(limit), _CMP_GE_OQ);
  return join((F32x8)_mm256_and_ps(low, is_low_kept), (F32x8)_mm256_and_ps(high, is_high_kept));
#else
  return select(value < limit, splat(0.0f), value);
#endif
}

// Bit i says whether lanes i are equal.
OCTAVO_INLINE uint32_t equal_lanes(F32 a, F32 b) {
#if defined(OCTAVO_AVX512)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
#elif defined(OCTAVO_AVX2)
  const __m256 low = _mm256_cmp_ps((__m256)low_half(a), (__m256)low_half(b), _CMP_EQ_OQ);
  const __m256 high = _mm256_cmp_ps((__m256)high_half(a), (__m256)high_half(b), _CMP_EQ_OQ);
  return static_cast<uint32_t>(_mm256_movemask_ps(low)) | static_cast<uint32_t>(_mm256_movemask_ps(high)) << 8;
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; i++) lanes |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return lanes;
#endif
}

// Sum and maximum of the lanes, always in the same order: halves onto each other.
OCTAVO_INLINE float reduce_add(F32 value) {
  const F32x8 eight = low_half(value) + high_half(value);
  const F32x4 first = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
  const F32x4 last = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const F32x4 four = first + last;
  const F32x4 two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}
OCTAVO_INLINE float reduce_max(F32 value) {
  const F32x8 low = low_half(value), high = high_half(value);
  const F32x8 eight = low > high ? low : high;
  const F32x4 first = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
  const F32x4 last = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const F32x4 four = first > last ? first : last;
  const F32x4 moved = __builtin_shufflevector(four, four, 2, 3, 2, 3);
  const F32x4 two = four > moved ? four : moved;
  return two[0] > two[1] ? two[0] : two[1];
}

// p · 2^n for whole n from -126 to 128, p near 1.
OCTAVO_INLINE F32 scale_by_power(F32 p, F32 n) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // Two factors, because 2 to the power of 128 is no fp32 number while the result still is one. The conversion reads
  // the whole number in the low bits of n + 1.5 · 2^23.
  const I32 exponent = (I32)(n + splat(12582912.0f)) - 0x4b400000;
  const I32 half = exponent >> 1;
  return p * (F32)((half + 127) << 23) * (F32)((exponent - half + 127) << 23);
#endif
}

// e to the power of each lane, within 2 ulp where the result is a normal number; 0 below -87.3, inf above 88.72.
OCTAVO_INLINE F32 exp(F32 x) {
  const F32 low = splat(-87.3f), high = splat(88.72f);
  const F32 clamped = min(high, max(low, x));  // in this order NaN stays
  const F32 n = fma(clamped, splat(1.44269504f), splat(12582912.0f)) - splat(12582912.0f);  // rounded to a whole number
  const F32 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  const F32 result = scale_by_power(p, n);
#if defined(OCTAVO_AVX512)
  const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
  const __mmask16 is_above = _mm512_cmp_ps_mask((__m512)x, (__m512)high, _CMP_GT_OQ);
  return (F32)_mm512_mask_mov_ps(_mm512_maskz_mov_ps(is_kept, (__m512)result), is_above, (__m512)splat(INFINITY));
#elif defined(OCTAVO_AVX2)
  F32x8 halves[2] = {low_half(result), high_half(result)};
  const F32x8 given[2] = {low_half(x), high_half(x)};
  for (int i = 0; i < 2; i++) {
    const __m256 is_below = _mm256_cmp_ps((__m256)given[i], (__m256)low_half(low), _CMP_LT_OQ);
    const __m256 is_above = _mm256_cmp_ps((__m256)given[i], (__m256)low_half(high), _CMP_GT_OQ);
    const __m256 bounded = _mm256_blendv_ps((__m256)halves[i], _mm256_set1_ps(INFINITY), is_above);
    halves[i] = (F32x8)_mm256_andnot_ps(is_below, bounded);
  }
  return join(halves[0], halves[1]);
#else
  return select(x < low, splat(0.0f), select(x > high, splat(INFINITY), result));
#endif
}

// 1 / (1 + e^-x), within 4 ulp where the result is a normal number.
OCTAVO_INLINE F32 sigmoid(F32 x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// Within 2 ulp: a polynomial near 0 (Cephes), elsewhere from exp.
OCTAVO_INLINE F32 tanh(F32 x) {
  const F32 size = (F32)((U32)x & 0x7fffffff);
  const F32 square = x * x;
  F32 p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const F32 near = fma(p * square, x, x);
  const F32 far = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  const F32 signed_far = (F32)((U32)far | ((U32)x & 0x80000000u));
  return select(size < splat(0.625f), near, signed_far);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
