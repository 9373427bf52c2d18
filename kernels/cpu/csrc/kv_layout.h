// Where the numbers of the KV cache are.
//
// The cache of a layer is [2, num_blocks, block]: keys, then values. Where the block size and the head size are whole
// multiples of 16, a block is [num_kv_heads, block_size / 16] tiles of 16 tokens, so that what attention reads for a head
// is in one piece and in the order in which it multiplies:
//   keys    [head_dim / 2][16 tokens][2],     of 4-byte numbers [head_dim][16 tokens];
//   values  [8 pairs of tokens][head_dim][2], of 4-byte numbers [16 tokens][head_dim].
// Else a block is [block_size, num_kv_heads, head_dim] as in the reference, and attention gathers tiles from it.
// An int8 vector's scale, an fp32 number, lies behind its codes; in a tile the 16 scales lie behind all the codes.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTileTokens = 16;
constexpr int kMaxHeadDim = 256;

enum KvKind : int64_t { kKvFloat32 = 0, kKvBfloat16 = 1, kKvFp8 = 2, kKvInt8 = 3 };
enum KvPart : int64_t { kKeys = 0, kValues = 1 };

struct KvCache {
  char* data;
  int64_t kind;  // a KvKind
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
};

OCTAVO_INLINE int64_t element_bytes(const KvCache& cache) {
  return cache.kind == kKvFloat32 ? 4 : cache.kind == kKvBfloat16 ? 2 : 1;
}

OCTAVO_INLINE int64_t vector_bytes(const KvCache& cache) {
  return cache.head_dim * element_bytes(cache) + (cache.kind == kKvInt8 ? 4 : 0);
}

OCTAVO_INLINE bool is_tiled(const KvCache& cache) {
  return cache.block_size % kTileTokens == 0 && cache.head_dim % kLanes == 0;
}

OCTAVO_INLINE char* block_at(const KvCache& cache, int64_t part, int64_t block_id) {
  const int64_t block_bytes = cache.block_size * cache.num_kv_heads * vector_bytes(cache);
  return cache.data + (part * cache.num_blocks + block_id) * block_bytes;
}

// The tile of a tiled block which holds its token `offset`.
OCTAVO_INLINE char* tile_at(const KvCache& cache, int64_t part, int64_t block_id, int64_t offset, int64_t head) {
  const int64_t tile = head * (cache.block_size / kTileTokens) + offset / kTileTokens;
  return block_at(cache, part, block_id) + tile * kTileTokens * vector_bytes(cache);
}

// The vector of a block that is not tiled.
OCTAVO_INLINE char* vector_at(const KvCache& cache, int64_t part, int64_t block_id, int64_t offset, int64_t head) {
  return block_at(cache, part, block_id) + (offset * cache.num_kv_heads + head) * vector_bytes(cache);
}

// Where number `dim` of token `token` is in a tile of elements of `kWidth` to a word: 1 of four bytes, or 2.
template <int kWidth>
OCTAVO_INLINE int64_t place_in_tile(bool is_key, int64_t token, int64_t dim, int64_t head_dim) {
  return is_key ? (dim / kWidth * kTileTokens + token) * kWidth + dim % kWidth
                : (token / kWidth * head_dim + dim) * kWidth + token % kWidth;
}

typedef uint8_t U8 __attribute__((vector_size(16)));

// The e4m3 numbers below 2^-6 in size, as bfloat16.
constexpr uint16_t kFp8Subnormals[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

// An e4m3 number as bfloat16, which holds it exactly.
constexpr uint16_t widen_fp8(uint8_t code) {
  const int size = code & 0x7f;
  const int number = size < 8 ? kFp8Subnormals[size] : size == 0x7f ? 0x7fc0 : (size << 4) + (120 << 7);
  return static_cast<uint16_t>(number | (code & 0x80) << 8);
}

struct Fp8Table {
  uint16_t numbers[256];
  constexpr Fp8Table() : numbers{} {
    for (int code = 0; code < 256; code++) numbers[code] = widen_fp8(static_cast<uint8_t>(code));
  }
};
constexpr Fp8Table kFp8;

// To the nearest e4m3 number, ties to even, at most 448 in size; NaN stays NaN.
OCTAVO_INLINE U8 encode_fp8(F32 value) {
  const F32 clamped = min(max(splat(-448.0f), value), splat(448.0f));
  const U32 sign = (U32)value >> 31 << 7, bits = (U32)clamped & 0x7fffffff;
  const U32 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  const F32 steps = (F32)bits * splat(512.0f) + splat(12582912.0f);  // the integer lands in the low bits
  const U32 subnormal = (U32)steps & 0xf;
  const U32 code = bits < (121u << 23) ? subnormal : normal;
  const U32 or_nan = (U32)(value != value) != 0 ? U32{} + 0x7f : code;
  return __builtin_convertvector(or_nan | sign, U8);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
