// What the machine can do at best: bytes read from memory, and operations of the dot products of each type.

#include "amx.h"
#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct PeakArgs {
  const float* memory;
  int64_t num_bytes;   // a multiple of the part that a thread takes
  int64_t num_rounds;  // of every thread
  double* operations;  // [threads], that each thread did
  float* sink;         // [threads · 16], keeps results alive
};

constexpr int64_t kPart = int64_t{1} << 18;
#if defined(OCTAVO_AVX512)
constexpr int kChains = 16;
#else
constexpr int kChains = 4;
#endif

OCTAVO_KERNEL(read_memory, PeakArgs) {
  F32 sums[4] = {};
  const int64_t num_parts = args.num_bytes / kPart;
  for (int64_t part = work.take(); part < num_parts; part = work.take()) {
    const float* from = args.memory + part * (kPart / 4);
    for (int64_t i = 0; i < kPart / 4; i += 4 * kLanes) {
      for (int chain = 0; chain < 4; chain++) sums[chain] += load(from + i + chain * kLanes);
    }
  }
  store(args.sink + work.thread * kLanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
}

OCTAVO_KERNEL(multiply_fp32, PeakArgs) {
  F32 sums[kChains] = {};
  const F32 a = load(args.memory), b = load(args.memory + kLanes);
  for (int64_t round = 0; round < args.num_rounds; round++) {
    for (F32& sum : sums) sum = fma(a, b, sum);
  }
  F32 total{};
  for (const F32& sum : sums) total += sum;
  store(args.sink + work.thread * kLanes, total);
  args.operations[work.thread] = 2.0 * kLanes * kChains * static_cast<double>(args.num_rounds);
}

#if defined(OCTAVO_AMX)
// Four products at a time: two tiles of rows, two of columns.
template <class Multiply>
OCTAVO_INLINE void multiply_tiles(const PeakArgs& args, Work& work, Multiply multiply, double operations) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = kTileRows;
  }
  load_tile_config(config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, args.memory, 64);
  _tile_loadd(5, args.memory + 256, 64);
  _tile_loadd(6, args.memory + 512, 64);
  _tile_loadd(7, args.memory + 768, 64);
  for (int64_t round = 0; round < args.num_rounds; round++) multiply();
  alignas(64) float result[256];
  _tile_stored(0, result, 64);
  _tile_release();
  store(args.sink + work.thread * kLanes, load(result));
  args.operations[work.thread] = 4 * operations * static_cast<double>(args.num_rounds);
}

OCTAVO_KERNEL(multiply_bf16, PeakArgs) {
  const auto multiply = [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  };
  multiply_tiles(args, work, multiply, 2.0 * 16 * 16 * 32);
}

OCTAVO_KERNEL(multiply_int8, PeakArgs) {
  const auto multiply = [] {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  };
  multiply_tiles(args, work, multiply, 2.0 * 16 * 16 * 64);
}
#else
#if defined(OCTAVO_AVX512_BF16)
OCTAVO_KERNEL(multiply_bf16, PeakArgs) {
  __m512 sums[kChains] = {};
  const __m512bh a = (__m512bh)load(args.memory), b = (__m512bh)load(args.memory + kLanes);
  for (int64_t round = 0; round < args.num_rounds; round++) {
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
  }
  F32 total{};
  for (const __m512& sum : sums) total += (F32)sum;
  store(args.sink + work.thread * kLanes, total);
  args.operations[work.thread] = 4.0 * kLanes * kChains * static_cast<double>(args.num_rounds);
}
#endif
#if defined(OCTAVO_AVX512)
OCTAVO_KERNEL(multiply_int8, PeakArgs) {
  __m512i sums[kChains] = {};
  const __m512i a = (__m512i)load(args.memory), b = (__m512i)load(args.memory + kLanes);
  for (int64_t round = 0; round < args.num_rounds; round++) {
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
  __m512i total{};
  for (const __m512i& sum : sums) total = _mm512_add_epi32(total, sum);
  store(args.sink + work.thread * kLanes, (F32)total);
  args.operations[work.thread] = 8.0 * kLanes * kChains * static_cast<double>(args.num_rounds);
}
#elif defined(OCTAVO_AVX2)
OCTAVO_KERNEL(multiply_int8, PeakArgs) {
  __m256i sums[8] = {};
  const __m256i b = (__m256i)low_half(load(args.memory + kLanes)), ones = _mm256_set1_epi16(1);
  __m256i a = (__m256i)low_half(load(args.memory));
  for (int64_t round = 0; round < args.num_rounds; round++) {
    for (__m256i& sum : sums) {
      asm("" : "+x"(a));  // else the product is computed once
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  }
  __m256i total{};
  for (const __m256i& sum : sums) total = _mm256_add_epi32(total, sum);
  std::memcpy(args.sink + work.thread * kLanes, &total, sizeof total);
  args.operations[work.thread] = 2.0 * 32 * 8 * static_cast<double>(args.num_rounds);
}
#endif
#endif

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
