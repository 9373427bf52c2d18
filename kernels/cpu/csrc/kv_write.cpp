// Rotary embedding of queries and keys, and the write of keys and values into the cache, in one pass over a projection.

#include "kernel.h"
#include "kv_layout.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Tokens of a prompt share the lines of a tile, which two threads would take from each other; few tokens are of
// different requests, and share nothing.
constexpr int64_t kManyTokens = 64;

OCTAVO_INLINE int64_t tokens_at_a_time(int64_t num_rows) { return num_rows < kManyTokens ? 4 : kTileTokens; }

struct WriteKvArgs {
  KvCache cache;
  void* query;                  // [tokens, num_query_heads, head_dim], turned in place; null: there is none
  const void* key;              // [tokens, num_kv_heads, head_dim]
  const void* value;            // the same
  const int64_t* positions;     // [tokens]; not read without cos_sin
  const float* cos_sin;         // [num_positions, rotary_dim]; null: keys are stored as they are
  const int64_t* slot_mapping;  // [tokens]; -1: not stored
  const float* kv_scales;       // [2], for fp8
  int64_t query_stride;         // numbers from a token to the next
  int64_t key_stride;
  int64_t value_stride;
  int64_t num_query_heads;
  int64_t num_positions;
  int64_t rotary_dim;
  int64_t is_bf16;  // query, key and value are bfloat16, else fp32
};

template <class T>
OCTAVO_INLINE void turn_pairs(const T* from, T* to, const float* cos, const float* sin, int64_t half, int count) {
  const F32 first = load_first(from, count), second = load_first(from + half, count);
  const F32 cosine = load_first(cos, count), sine = load_first(sin, count);
  const F32 left = first * cosine, right = second * sine, up = second * cosine, down = first * sine;
  store_first(to, left - right, count);
  store_first(to + half, up + down, count);
}

// Turns one head; `to` may be `from`.
template <class T>
void turn(const T* from, T* to, const float* angles, int64_t rotary_dim, int64_t head_dim) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) turn_pairs(from + i, to + i, angles + i, angles + half + i, half, kLanes);
  if (i < half) turn_pairs(from + i, to + i, angles + i, angles + half + i, half, static_cast<int>(half - i));
  if (to != from) std::memcpy(to + rotary_dim, from + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
}

// A vector as it is stored: its elements, and for int8 its scale.
struct Stored {
  alignas(64) char bytes[kMaxHeadDim * 4];
  float scale;
};

template <class T>
void encode(const T* vector, const KvCache& cache, float kv_scale, Stored& stored) {
  const int64_t head_dim = cache.head_dim;
  if (cache.kind == kKvFloat32 || cache.kind == kKvBfloat16) {
    std::memcpy(stored.bytes, vector, head_dim * sizeof(T));
    return;
  }
  F32 numbers[kMaxHeadDim / kLanes];
  F32 largest{};
  const int num_parts = static_cast<int>((head_dim + kLanes - 1) / kLanes);
  for (int i = 0; i < num_parts; i++) {
    const int64_t left = head_dim - i * kLanes;
    numbers[i] = load_first(vector + i * kLanes, static_cast<int>(left < kLanes ? left : kLanes));
    largest = max(largest, (F32)((U32)numbers[i] & 0x7fffffff));
  }
  const bool is_int8 = cache.kind == kKvInt8;
  stored.scale = is_int8 ? reduce_max(largest) * (1.0f / 127.0f) : kv_scale;
  const F32 divisor = splat(is_int8 && stored.scale < 1.17549435e-38f ? 1.17549435e-38f : stored.scale);
  for (int i = 0; i < num_parts; i++) {
    const F32 scaled = numbers[i] / divisor;
    const F32 rounded = (scaled + splat(12582912.0f)) - splat(12582912.0f);
    const F32 code = min(max(splat(-127.0f), rounded), splat(127.0f));
    const U8 bytes = is_int8 ? (U8)__builtin_convertvector(__builtin_convertvector(code, I32), I8) : encode_fp8(scaled);
    std::memcpy(stored.bytes + i * kLanes, &bytes, sizeof bytes);
  }
}

template <class Element, int kWidth>
void store_in_tile(char* tile, const Stored& stored, bool is_key, int64_t token, int64_t head_dim) {
  const Element* from = reinterpret_cast<const Element*>(stored.bytes);
  Element* to = reinterpret_cast<Element*>(tile);
  if (is_key) {
    for (int64_t dim = 0; dim < head_dim; dim += kWidth) {
      std::memcpy(to + (dim / kWidth * kTileTokens + token) * kWidth, from + dim, kWidth * sizeof(Element));
    }
  } else {
    to += token / kWidth * head_dim * kWidth + token % kWidth;
    for (int64_t dim = 0; dim < head_dim; dim++) to[dim * kWidth] = from[dim];
  }
}

void put(const KvCache& cache, KvPart part, int64_t slot, int64_t head, const Stored& stored) {
  const int64_t block_id = slot / cache.block_size, offset = slot % cache.block_size, head_dim = cache.head_dim;
  const bool is_key = part == kKeys;
  char* scale;
  if (is_tiled(cache)) {
    char* tile = tile_at(cache, part, block_id, offset, head);
    const int64_t token = offset % kTileTokens;
    if (cache.kind == kKvFloat32) {
      store_in_tile<uint32_t, 1>(tile, stored, is_key, token, head_dim);
    } else if (cache.kind == kKvBfloat16) {
      store_in_tile<uint16_t, 2>(tile, stored, is_key, token, head_dim);
    } else {
      store_in_tile<uint8_t, 2>(tile, stored, is_key, token, head_dim);
    }
    scale = tile + kTileTokens * head_dim + token * sizeof(float);
  } else {
    char* vector = vector_at(cache, part, block_id, offset, head);
    std::memcpy(vector, stored.bytes, head_dim * element_bytes(cache));
    scale = vector + head_dim;
  }
  if (cache.kind == kKvInt8) std::memcpy(scale, &stored.scale, sizeof(float));
}

template <class T>
void write_token(const WriteKvArgs& args, int64_t token, Work& work) {
  const KvCache& cache = args.cache;
  const int64_t head_dim = cache.head_dim, slot = args.slot_mapping[token];
  const float* angles = nullptr;
  if (args.cos_sin != nullptr) {
    const int64_t position = args.positions[token];
    if (position < 0 || position >= args.num_positions) return work.fail(Failure::kIndexOutOfRange);
    angles = args.cos_sin + position * args.rotary_dim;
    T* query = static_cast<T*>(args.query) + token * args.query_stride;
    for (int64_t head = 0; head < args.num_query_heads; head++) {
      turn(query + head * head_dim, query + head * head_dim, angles, args.rotary_dim, head_dim);
    }
  }
  if (slot == -1) return;
  if (slot < 0 || slot >= cache.num_blocks * cache.block_size) return work.fail(Failure::kIndexOutOfRange);
  const T* key = static_cast<const T*>(args.key) + token * args.key_stride;
  const T* value = static_cast<const T*>(args.value) + token * args.value_stride;
  const float* scales = args.kv_scales;
  T turned[kMaxHeadDim];
  Stored stored;
  for (int64_t head = 0; head < cache.num_kv_heads; head++, key += head_dim, value += head_dim) {
    if (angles != nullptr) turn(key, turned, angles, args.rotary_dim, head_dim);
    encode(angles == nullptr ? key : turned, cache, scales == nullptr ? 1.0f : scales[kKeys], stored);
    put(cache, kKeys, slot, head, stored);
    encode(value, cache, scales == nullptr ? 1.0f : scales[kValues], stored);
    put(cache, kValues, slot, head, stored);
  }
}

OCTAVO_KERNEL(write_kv, WriteKvArgs) {
  const int64_t step = tokens_at_a_time(work.num_rows);
  for (int64_t first = work.take(step); first < work.num_rows; first = work.take(step)) {
    for (int64_t token = first; token < first + step && token < work.num_rows; token++) {
      args.is_bf16 ? write_token<bf16>(args, token, work) : write_token<float>(args, token, work);
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
