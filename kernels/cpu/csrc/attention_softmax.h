// The softmax of attention, chunk by chunk of the keys: weights of a chunk relative to its own largest score, and the
// joining of chunks in their order.
#pragma once

#include "attention_tiles.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kLog2E = 1.44269504f;
constexpr int kRows = 16;  // rows (one query of one head each) that are computed together

// 2 to the power of each lane, for lanes up to 0 or a little above; 2^-125 below that, because numbers that are no normal
// ones take the processor a hundred times as long. NaN stays NaN. Within 2 ulp, or within 2^-17 of itself, which is
// enough for a number that is going to be a bfloat16.
template <bool kIsRough = false>
OCTAVO_INLINE F32 exp2(F32 x) {
  const F32 clamped = max(splat(-125.0f), x);  // in this order NaN stays
#if defined(OCTAVO_AVX512)
  const F32 n = (F32)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const F32 n = (clamped + splat(12582912.0f)) - splat(12582912.0f);
#endif
  const F32 r = clamped - n;
  F32 p;
  if constexpr (kIsRough) {
    p = fma(splat(9.570101434e-3f), r, splat(5.591786028e-2f));
    p = fma(p, r, splat(2.402474484e-1f));
    p = fma(p, r, splat(6.931218147e-1f));
    p = fma(p, r, splat(9.999992614e-1f));
  } else {
    p = fma(splat(1.535336188e-4f), r, splat(1.339887440e-3f));
    p = fma(p, r, splat(9.618437357e-3f));
    p = fma(p, r, splat(5.550332471e-2f));
    p = fma(p, r, splat(2.402264791e-1f));
    p = fma(p, r, splat(6.931472028e-1f));
    p = fma(p, r, splat(1.0f));
  }
  return scale_by_power(p, n);
}

// How a product of query and key becomes a score, in units of log 2.
struct ScoreRule {
  float scale;     // with log2(e), and with the scale of an fp8 cache's keys
  float soft_cap;  // with log2(e); 0: none
};

OCTAVO_INLINE F32 score_of(F32 product, const float* key_scales, const ScoreRule& rule) {
  F32 score = product * splat(rule.scale);
  if (key_scales != nullptr) score *= load(key_scales);
  if (rule.soft_cap != 0) score = tanh(score / splat(rule.soft_cap)) * splat(rule.soft_cap);
  return score;
}

// The value in lanes [begin, end), `other` in the rest.
OCTAVO_INLINE F32 only_lanes(F32 value, int begin, int end, F32 other) {
  const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select((lane >= begin) & (lane < end), value, other);
}

// The keys of a chunk that a row sees.
struct RowKeys {
  int begin;
  int end;
};

// A row's largest score in a chunk, -inf when it sees none of its keys. Products are [kChunkTokens]; those of tiles outside
// of [first_tile, end_tile) are not touched. kIsPlain: no soft cap, no scales; else scores take the place of products.
// is_whole: the row sees all keys.
template <bool kIsPlain>
OCTAVO_INLINE float find_largest(float* products, const Chunk& chunk, int first_tile, int end_tile, RowKeys keys,
                                 const ScoreRule& rule, bool is_whole) {
  const F32 nothing = splat(-INFINITY);
  F32 largest = nothing;
#pragma GCC unroll 8
  for (int i = first_tile; i < end_tile; i++) {
    F32 score = load(products + i * kTileTokens);
    if constexpr (!kIsPlain) score = score_of(score, chunk.tiles[i].key_scales, rule);
    if (!is_whole) score = only_lanes(score, keys.begin - i * kTileTokens, keys.end - i * kTileTokens, nothing);
    if (!kIsPlain) store(products + i * kTileTokens, score);
    largest = max(score, largest);
  }
  // A plain score is its product times the scale, which the exponent takes in one step with the difference.
  return reduce_max(largest) * (kIsPlain ? rule.scale : 1.0f);
}

// Turns a row's scores, or plain products, into weights [kChunkTokens], and returns their sum.
template <bool kIsPlain, class Number>
OCTAVO_INLINE float weigh_row(const float* products, float row_largest, Number* weights, const Chunk& chunk,
                              int first_tile, int end_tile, RowKeys keys, const ScoreRule& rule, bool is_whole) {
  if (row_largest == -INFINITY) {
    for (int i = first_tile; i < end_tile; i++) store(weights + i * kTileTokens, F32{});
    return 0.0f;
  }
  const float factor = kIsPlain ? rule.scale : 1.0f;
  F32 total{};
#pragma GCC unroll 8
  for (int i = first_tile; i < end_tile; i++) {
    F32 weight = exp2<sizeof(Number) == 2>(fma(load(products + i * kTileTokens), splat(factor), splat(-row_largest)));
    const int begin = keys.begin - i * kTileTokens, end = keys.end - i * kTileTokens;
    if (!is_whole) weight = only_lanes(weight, begin, end, F32{});
    total += weight;
    if constexpr (!kIsPlain) {
      const float* scales = chunk.tiles[i].value_scales;
      if (scales != nullptr) weight *= load(scales);
      if (scales != nullptr && !is_whole) weight = only_lanes(weight, begin, end, F32{});  // a scale may be anything there
    }
    store(weights + i * kTileTokens, weight);
  }
  return reduce_add(total);
}

// What the chunks so far gave to up to 16 rows.
struct RowStates {
  alignas(64) float largest[kRows];
  alignas(64) float total[kRows];

  void clear() {
    store(largest, splat(-INFINITY));
    store(total, F32{});
  }
};

// Turns products of rows [num_rows, kChunkTokens] with a chunk's keys into weights. All rows' largest scores come first, so
// that the processor does not wait for one row's before it begins with the next.
template <bool kIsPlain, class Number>
OCTAVO_INLINE void weigh_tiles(float* products, Number* weights, const Chunk& chunk, int first_tile, int end_tile,
                               const RowKeys* keys, int num_rows, const ScoreRule& rule, bool is_whole, RowStates& states) {
  for (int i = 0; i < num_rows; i++) {
    states.largest[i] =
        find_largest<kIsPlain>(products + i * kChunkTokens, chunk, first_tile, end_tile, keys[i], rule, is_whole);
  }
  for (int i = 0; i < num_rows; i++) {
    states.total[i] = weigh_row<kIsPlain>(products + i * kChunkTokens, states.largest[i], weights + i * kChunkTokens, chunk,
                                          first_tile, end_tile, keys[i], rule, is_whole);
  }
}

template <class Number>
OCTAVO_INLINE void weigh_rows(float* products, Number* weights, const Chunk& chunk, int end_tile, const RowKeys* keys,
                              int num_rows, const ScoreRule& rule, RowStates& states) {
  const bool is_plain = rule.soft_cap == 0 && chunk.tiles[chunk.first_tile].key_scales == nullptr;
  bool is_whole = true;
  for (int i = 0; i < num_rows; i++) is_whole = is_whole && keys[i].begin == 0 && keys[i].end == kChunkTokens;
  if (is_plain && is_whole) {
    weigh_tiles<true>(products, weights, chunk, 0, kChunkTiles, keys, num_rows, rule, true, states);
  } else if (is_plain) {
    weigh_tiles<true>(products, weights, chunk, chunk.first_tile, end_tile, keys, num_rows, rule, false, states);
  } else if (is_whole) {
    weigh_tiles<false>(products, weights, chunk, 0, kChunkTiles, keys, num_rows, rule, true, states);
  } else {
    weigh_tiles<false>(products, weights, chunk, chunk.first_tile, end_tile, keys, num_rows, rule, false, states);
  }
}

// Joins the next chunk: sums [kRows, dim] += what it gave, both rescaled to the larger of the two largest scores.
// A row to which it gave nothing (largest is -inf) stays as it is.
OCTAVO_INLINE void join_chunk(RowStates& states, float* sums, const RowStates& chunk, const float* chunk_sums,
                              int64_t chunk_stride, int num_rows, int64_t dim) {
  const F32 before = load(states.largest), next = load(chunk.largest);
  const F32 largest = max(next, before);
  const I32 is_nothing = next == splat(-INFINITY);
  alignas(64) float keep[kRows], add[kRows];
  const F32 kept = select(is_nothing, splat(1.0f), exp2(before - largest));
  const F32 added = exp2(next - largest);
  store(keep, kept);
  store(add, added);
  store(states.total, select(is_nothing, load(states.total), fma(load(states.total), kept, load(chunk.total) * added)));
  store(states.largest, select(is_nothing, before, largest));
  for (int row = 0; row < num_rows; row++) {
    if (chunk.largest[row] == -INFINITY) continue;
    const F32 row_kept = splat(keep[row]), row_added = splat(add[row]);
    float* to = sums + row * dim;
    const float* from = chunk_sums + row * chunk_stride;
    for (int64_t i = 0; i < dim; i += kLanes) store(to + i, fma(load(to + i), row_kept, load(from + i) * row_added));
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
