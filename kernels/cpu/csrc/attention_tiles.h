// The tiles of keys and values that attention multiplies: in place in the cache, or put together in scratch memory.
//
// A tile is 16 tokens of one head, in elements that are bfloat16 pairs or fp32 numbers (see kv_layout.h for the order).
// Bytes are widened to bfloat16, which holds them exactly. Values of tokens which may not be read, or were never
// written, become zeros, because zero times what lies there may be NaN; keys may be anything there, since their scores
// are not used.
#pragma once

#include "kv_layout.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kChunkTiles = 8;
constexpr int kChunkTokens = kChunkTiles * kTileTokens;

struct Tile {
  const char* key;
  const char* value;
  const float* key_scales;    // of 16 tokens; null but for int8
  const float* value_scales;  // the same
};

struct Chunk {
  Tile tiles[kChunkTiles];
  int first_tile;  // of those that are needed
  int end_tile;
};

template <class Element>
constexpr int kWidth = sizeof(Element) == 4 ? 1 : 2;

// Scratch memory of a chunk, for head sizes up to `dim`: keys, values, scales.
template <class Element>
struct ChunkScratch {
  Element* elements;  // [kChunkTiles, 2, 16 * dim]
  float* scales;      // [kChunkTiles, 2, 16]
  int64_t dim;        // the head size, rounded up to a multiple of 16

  static int64_t num_bytes(int64_t dim) { return kChunkTiles * 2 * kTileTokens * (dim * sizeof(Element) + 4); }
  Element* tile(int index, int part) const { return elements + (index * 2 + part) * kTileTokens * dim; }
  float* scales_of(int index, int part) const { return scales + (index * 2 + part) * kTileTokens; }
};

// Widens `count` bytes, a multiple of 32, to bfloat16 numbers, without their scales.
OCTAVO_INLINE void widen_int8(const char* from, int64_t count, bf16* to) {
#if defined(OCTAVO_AVX512_BF16)
  for (int64_t i = 0; i < count; i += 32) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i))));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i + 16))));
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#else
  const auto* codes = reinterpret_cast<const int8_t*>(from);
  for (int64_t i = 0; i < count; i++) {
    const float number = codes[i];
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    to[i].bits = static_cast<uint16_t>(bits >> 16);
  }
#endif
}
OCTAVO_INLINE void widen_fp8(const char* from, int64_t count, bf16* to) {
#if defined(OCTAVO_AVX512)
  alignas(64) uint16_t table[32] = {};
  std::memcpy(table, kFp8Subnormals, sizeof kFp8Subnormals);
  const __m512i subnormals = _mm512_load_si512(table), bias = _mm512_set1_epi16(120 << 7);
  for (int64_t i = 0; i < count; i += 32) {
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + i)));
    const __m512i sizes = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(sizes, 4), bias);
    const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(sizes, _mm512_set1_epi16(8));
    const __m512i numbers = _mm512_mask_permutexvar_epi16(normal, is_subnormal, sizes, subnormals);
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(sizes, _mm512_set1_epi16(0x7f));
    const __m512i or_nan = _mm512_mask_mov_epi16(numbers, is_nan, _mm512_set1_epi16(0x7fc0));
    const __m512i signs = _mm512_slli_epi16(_mm512_xor_si512(codes, sizes), 8);
    _mm512_storeu_si512(to + i, _mm512_or_si512(or_nan, signs));
  }
#else
  for (int64_t i = 0; i < count; i++) to[i].bits = kFp8.numbers[static_cast<uint8_t>(from[i])];
#endif
}

OCTAVO_INLINE void widen_bytes(const KvCache& cache, const char* from, int64_t count, bf16* to) {
  cache.kind == kKvInt8 ? widen_int8(from, count, to) : widen_fp8(from, count, to);
}
OCTAVO_INLINE void widen_bytes(const KvCache&, const char*, int64_t, float*) {}  // an fp32 cache has no bytes

// Copies values but for those of tokens outside of [begin, end), which become zeros; `to` may be `from`.
OCTAVO_INLINE void clear_others(const bf16* from, bf16* to, int64_t dim, int begin, int end) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  auto* cleared = reinterpret_cast<uint32_t*>(to);
  for (int pair = 0; pair < kTileTokens / 2; pair++) {
    const bool has_first = begin <= 2 * pair && 2 * pair < end;
    const bool has_second = begin <= 2 * pair + 1 && 2 * pair + 1 < end;
    const uint32_t mask = (has_first ? 0xffffu : 0) | (has_second ? 0xffff0000u : 0);
    for (int64_t i = pair * dim; i < (pair + 1) * dim; i++) cleared[i] = words[i] & mask;
  }
}
OCTAVO_INLINE void clear_others(const float* from, float* to, int64_t dim, int begin, int end) {
  for (int token = 0; token < kTileTokens; token++) {
    const bool is_kept = begin <= token && token < end;
    for (int64_t i = token * dim; i < (token + 1) * dim; i++) to[i] = is_kept ? from[i] : 0.0f;
  }
}

// Points `tile` to the tile of a tiled cache; tokens [begin, end) of it are there.
template <class Element>
void find_tile(const KvCache& cache, const ChunkScratch<Element>& scratch, int index, int64_t block_id, int64_t offset,
               int64_t head, int begin, int end, Tile& tile) {
  const char* places[2];
  const bool is_whole = begin == 0 && end == kTileTokens;
  for (int part = 0; part < 2; part++) {
    const char* from = tile_at(cache, part, block_id, offset, head);
    Element* own = scratch.tile(index, part);
    const bool has_bytes = element_bytes(cache) == 1;
    if (has_bytes) widen_bytes(cache, from, kTileTokens * scratch.dim, own);
    const bool is_cleared = part == kValues && !is_whole;
    if (is_cleared) clear_others(has_bytes ? own : reinterpret_cast<const Element*>(from), own, scratch.dim, begin, end);
    places[part] = has_bytes || is_cleared ? reinterpret_cast<const char*>(own) : from;
    if (cache.kind == kKvInt8) {
      const auto* scales = reinterpret_cast<const float*>(from + kTileTokens * cache.head_dim);
      (part == kKeys ? tile.key_scales : tile.value_scales) = scales;
    }
  }
  tile.key = places[kKeys];
  tile.value = places[kValues];
}

OCTAVO_INLINE void set_element(float value, float* to) { *to = value; }
OCTAVO_INLINE void set_element(float value, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = static_cast<uint16_t>(bits >> 16);  // the value is a bfloat16 number
}

// One vector of a cache that is not tiled, as fp32 numbers without their scale; returns the scale.
OCTAVO_INLINE float read_vector(const KvCache& cache, const char* from, float* numbers) {
  if (cache.kind == kKvFloat32) {
    std::memcpy(numbers, from, cache.head_dim * sizeof(float));
  } else if (cache.kind == kKvBfloat16) {
    for (int64_t dim = 0; dim < cache.head_dim; dim++) numbers[dim] = to_float(reinterpret_cast<const bf16*>(from)[dim]);
  } else if (cache.kind == kKvInt8) {
    for (int64_t dim = 0; dim < cache.head_dim; dim++) numbers[dim] = reinterpret_cast<const int8_t*>(from)[dim];
  } else {
    const auto* codes = reinterpret_cast<const uint8_t*>(from);
    for (int64_t dim = 0; dim < cache.head_dim; dim++) numbers[dim] = to_float(bf16{kFp8.numbers[codes[dim]]});
  }
  float scale = 1.0f;
  if (cache.kind == kKvInt8) std::memcpy(&scale, from + cache.head_dim, sizeof scale);
  return scale;
}

// Puts together the tile of the tokens from `position` on, of a cache that is not tiled; [begin, end) of them are there.
template <class Element>
void gather_tile(const KvCache& cache, const ChunkScratch<Element>& scratch, int index, const int32_t* block_table,
                 int64_t position, int64_t head, int begin, int end, Tile& tile) {
  for (int part = 0; part < 2; part++) {
    Element* own = scratch.tile(index, part);
    float* scales = scratch.scales_of(index, part);
    std::memset(own, 0, kTileTokens * scratch.dim * sizeof(Element));
    for (int token = begin; token < end; token++) {
      const int64_t block_id = block_table[(position + token) / cache.block_size];
      const int64_t offset = (position + token) % cache.block_size;
      float numbers[kMaxHeadDim];
      scales[token] = read_vector(cache, vector_at(cache, part, block_id, offset, head), numbers);
      for (int64_t dim = 0; dim < cache.head_dim; dim++) {
        const int64_t place = place_in_tile<kWidth<Element>>(part == kKeys, token, dim, scratch.dim);
        set_element(numbers[dim], own + place);
      }
    }
  }
  tile.key = reinterpret_cast<const char*>(scratch.tile(index, kKeys));
  tile.value = reinterpret_cast<const char*>(scratch.tile(index, kValues));
  tile.key_scales = cache.kind == kKvInt8 ? scratch.scales_of(index, kKeys) : nullptr;
  tile.value_scales = cache.kind == kKvInt8 ? scratch.scales_of(index, kValues) : nullptr;
}

// Finds the tiles of the chunk that begins at token `start`, of which the tokens in [first, end) are there to be read.
template <class Element>
void find_chunk(const KvCache& cache, const ChunkScratch<Element>& scratch, const int32_t* block_table, int64_t start,
                int64_t first, int64_t end, int64_t head, Chunk& chunk) {
  const int64_t from = first > start ? first - start : 0, to = end - start < kChunkTokens ? end - start : kChunkTokens;
  chunk.first_tile = static_cast<int>(from / kTileTokens);
  chunk.end_tile = static_cast<int>((to + kTileTokens - 1) / kTileTokens);
  for (int index = chunk.first_tile; index < chunk.end_tile; index++) {
    const int begin = static_cast<int>(from - index * kTileTokens), last = static_cast<int>(to - index * kTileTokens);
    const int clipped_begin = begin > 0 ? begin : 0, clipped_end = last < kTileTokens ? last : kTileTokens;
    const int64_t position = start + index * kTileTokens;
    Tile& tile = chunk.tiles[index];
    tile.key_scales = tile.value_scales = nullptr;
    if (is_tiled(cache)) {
      const int64_t block_id = block_table[position / cache.block_size], offset = position % cache.block_size;
      find_tile(cache, scratch, index, block_id, offset, head, clipped_begin, clipped_end, tile);
    } else {
      gather_tile(cache, scratch, index, block_table, position, head, clipped_begin, clipped_end, tile);
    }
  }
}

// Tiles that are multiplied next: asked for while others are, as much at a time as of those, because all at once would be
// waited for; and into the first cache, because what comes from the second takes the same few places in which fetches from
// memory wait.
class Ahead {
 public:
  explicit Ahead(int64_t tile_bytes) : tile_bytes_(tile_bytes) {}

  void add(const char* tile) { tiles_[count_++] = tile; }

  void ask(int64_t num_bytes) {
    while (num_bytes > 0 && next_ < count_) {
      const int64_t left = tile_bytes_ - asked_, end = num_bytes < left ? asked_ + num_bytes : tile_bytes_;
      num_bytes -= end - asked_;
      for (; asked_ < end; asked_ += 64) __builtin_prefetch(tiles_[next_] + asked_, 0, 3);
      if (asked_ == tile_bytes_) {
        asked_ = 0;
        next_++;
      }
    }
  }
  void ask_for_rest() { ask(INT64_MAX); }

 private:
  const char* tiles_[2 * kChunkTiles];
  int64_t tile_bytes_;
  int count_ = 0;
  int next_ = 0;       // the tile that is being asked for
  int64_t asked_ = 0;  // bytes of it
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
