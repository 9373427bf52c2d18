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
#include <immintrin.h>
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

struct bf16 {
  uint16_t bits;
};

OCTAVO_INLINE F32 splat(float value) { return value - F32{}; }

OCTAVO_INLINE float to_float(float value) { return value; }
OCTAVO_INLINE float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

OCTAVO_INLINE F32 widen(U16 bits) { return (F32)(__builtin_convertvector(bits, U32) << 16); }

// To the nearest bfloat16, ties to even; NaN stays NaN.
OCTAVO_INLINE U16 narrow(F32 value) {
#if defined(OCTAVO_AVX512_BF16)
  return (U16)_mm512_cvtneps_pbh((__m512)value);
#else
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 is_nan = (U32)(value != value);
  return __builtin_convertvector((rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan), U16);
#endif
}

OCTAVO_INLINE F32 load(const float* from) {
  F32 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
OCTAVO_INLINE F32 load(const bf16* from) {
  U16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return widen(bits);
}
OCTAVO_INLINE void store(float* to, F32 value) { std::memcpy(to, &value, sizeof value); }
OCTAVO_INLINE void store(bf16* to, F32 value) {
  const U16 bits = narrow(value);
  std::memcpy(to, &bits, sizeof bits);
}

// The first `count` of 16 numbers, 0 to 16; the others are 0, and are not read or written.
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

OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OCTAVO_AVX2)
  F32 result;
  for (int half = 0; half < 2; half++) {
    __m256 parts[3];
    std::memcpy(&parts[0], reinterpret_cast<const char*>(&a) + 32 * half, 32);
    std::memcpy(&parts[1], reinterpret_cast<const char*>(&b) + 32 * half, 32);
    std::memcpy(&parts[2], reinterpret_cast<const char*>(&c) + 32 * half, 32);
    const __m256 part = _mm256_fmadd_ps(parts[0], parts[1], parts[2]);
    std::memcpy(reinterpret_cast<char*>(&result) + 32 * half, &part, 32);
  }
  return result;
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE F32 select(I32 condition, F32 yes, F32 no) { return condition ? yes : no; }
OCTAVO_INLINE F32 max(F32 a, F32 b) { return select(a > b, a, b); }
OCTAVO_INLINE F32 min(F32 a, F32 b) { return select(a < b, a, b); }

// Sum and maximum of the lanes, always in the same order: halves onto each other.
OCTAVO_INLINE float reduce_add(F32 value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
OCTAVO_INLINE float reduce_max(F32 value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

// e to the power of each lane, within 2 ulp where the result is a normal number; 0 below -87.3, inf above 88.7.
OCTAVO_INLINE F32 exp(F32 x) {
  const F32 low = splat(-87.3f), high = splat(88.72f);
  const F32 clamped = min(max(x, low), high);
  const F32 scaled = fma(clamped, splat(1.44269504f), splat(12582912.0f));  // the integer lands in the low bits
  const F32 n = scaled - splat(12582912.0f);
  const F32 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  const I32 exponent = __builtin_convertvector(n, I32);
  // Two factors, because 2 to the power of 128 is no fp32 number while the result still is one.
  const I32 half = exponent >> 1;
  const F32 result = p * (F32)((half + 127) << 23) * (F32)((exponent - half + 127) << 23);
  const F32 bounded = select(x < low, splat(0.0f), select(x > high, splat(INFINITY), result));
  return select(x != x, x, bounded);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
