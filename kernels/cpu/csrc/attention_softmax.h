// The softmax of attention, chunk by chunk of the keys: weights of a chunk relative to its own largest score, and the
// joining of chunks in their order.
#pragma once

#include "attention_tiles.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kLog2E = 1.44269504f;
constexpr int kRows = 16;  // rows (one query of one head each) that are computed together

// 2 to the power of each lane, for lanes up to 0 or a little above; within 2 ulp, 0 below -126. NaN stays NaN.
OCTAVO_INLINE F32 exp2(F32 x) {
  const F32 low = splat(-252.0f);
  const F32 clamped = select(low > x, low, x);
#if defined(OCTAVO_AVX512)
  const F32 n = (F32)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const F32 n = (clamped + splat(12582912.0f)) - splat(12582912.0f);
#endif
  const F32 r = clamped - n;
  F32 p = splat(1.535336188e-4f);
  p = fma(p, r, splat(1.339887440e-3f));
  p = fma(p, r, splat(9.618437357e-3f));
  p = fma(p, r, splat(5.550332471e-2f));
  p = fma(p, r, splat(2.402264791e-1f));
  p = fma(p, r, splat(6.931472028e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // Two factors, because below -126 one is no normal number.
  const I32 exponent = __builtin_convertvector(n, I32), half = exponent >> 1;
  return p * (F32)((half + 127) << 23) * (F32)((exponent - half + 127) << 23);
#endif
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

OCTAVO_INLINE I32 lanes_within(int begin, int end) {
  const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (lane >= begin) & (lane < end);
}

struct RowSums {
  float largest;  // score; -inf when no key is visible
  float total;    // of the weights
};

// Turns one row's products with a chunk's keys into weights; only keys in [begin, end) of the chunk are visible.
// Products and weights are [kChunkTokens]; those of tiles outside of [first_tile, end_tile) are not touched.
template <class Number>
RowSums weigh_row(float* products, Number* weights, const Chunk& chunk, int end_tile, int begin, int end,
                  const ScoreRule& rule) {
  const F32 nothing = splat(-INFINITY);
  F32 largest = nothing;
  for (int i = chunk.first_tile; i < end_tile; i++) {
    const int from = begin - i * kTileTokens, to = end - i * kTileTokens;
    F32 score = nothing;
    if (to > 0 && from < kTileTokens) {
      score = score_of(load(products + i * kTileTokens), chunk.tiles[i].key_scales, rule);
      if (from > 0 || to < kTileTokens) score = select(lanes_within(from, to), score, nothing);
    }
    largest = max(score, largest);
    store(products + i * kTileTokens, score);
  }
  const float row_largest = reduce_max(largest);
  F32 total{};
  for (int i = chunk.first_tile; i < end_tile; i++) {
    const int from = begin - i * kTileTokens, to = end - i * kTileTokens;
    F32 weight{};
    if (to > 0 && from < kTileTokens) {
      weight = exp2(load(products + i * kTileTokens) - splat(row_largest));
      const bool is_whole = from <= 0 && to >= kTileTokens;
      if (!is_whole) weight = select(lanes_within(from, to), weight, F32{});
      total += weight;
      const float* scales = chunk.tiles[i].value_scales;
      if (scales != nullptr) weight *= is_whole ? load(scales) : select(lanes_within(from, to), load(scales), F32{});
    }
    store(weights + i * kTileTokens, weight);
  }
  return {row_largest, reduce_add(total)};
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
