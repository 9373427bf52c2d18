// Rows of logits, read in parts of a fixed size, so that a row's results do not depend on who reads which part.
//
// A row is segments of 256 tokens, and chunks of 32 segments, which threads share out among themselves; the last ones
// may be shorter. The numbers found for the parts of a row lie together in memory that all threads see.
#pragma once

#include <algorithm>
#include <functional>

#include "simd.h"
#include "team.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int64_t kSegment = 256;
constexpr int64_t kSegmentsOfChunk = 32;

struct Candidate {
  float value;
  int32_t token_id;
};

struct Rows {
  const float* logits;  // [any number, vocab_size]
  double* found;        // [rows, 2 · number of segments]
  int64_t vocab_size;
  const int64_t* places = nullptr;  // [rows], of each row among the logits; null: the first ones are meant
  int64_t num_places = 0;           // rows of logits that there are; not read without `places`

  int64_t num_segments() const { return (vocab_size + kSegment - 1) / kSegment; }
  int64_t num_chunks() const { return (num_segments() + kSegmentsOfChunk - 1) / kSegmentsOfChunk; }
};

// Whether each row has its place among the logits; fails the run otherwise. Every phase has to ask.
OCTAVO_INLINE bool are_inside(const Rows& rows, Work& work) {
  if (rows.places == nullptr) return true;
  const auto is_inside = [&](int64_t place) { return place >= 0 && place < rows.num_places; };
  const bool are_all = std::all_of(rows.places, rows.places + work.num_rows, is_inside);
  if (!are_all) work.fail(Failure::kIndexOutOfRange);
  return are_all;
}

// One row, and what is known of its parts.
struct Row {
  const float* logits;
  int64_t vocab_size;
  int64_t num_segments;
  int64_t num_chunks;
  double* sums;    // of the weights of each segment
  float* maxima;   // of each segment
  float* largest;  // logit of each chunk; NaN when the chunk has a NaN or +inf

  Row(const Rows& rows, int64_t row)
      : logits(rows.logits + (rows.places == nullptr ? row : rows.places[row]) * rows.vocab_size),
        vocab_size(rows.vocab_size),
        num_segments(rows.num_segments()),
        num_chunks(rows.num_chunks()),
        sums(rows.found + row * 2 * num_segments),
        maxima(reinterpret_cast<float*>(sums + num_segments)),
        largest(maxima + num_segments) {}

  // Segments from the first of a chunk to the end of it.
  int64_t first_segment(int64_t chunk) const { return chunk * kSegmentsOfChunk; }
  int64_t end_segment(int64_t chunk) const { return std::min(num_segments, (chunk + 1) * kSegmentsOfChunk); }

  // The 256 logits of a segment; those that a short last one lacks are -inf, in `padded`.
  const float* segment(int64_t index, float* padded) const {
    const int64_t start = index * kSegment, count = std::min(kSegment, vocab_size - start);
    if (count == kSegment) return logits + start;
    std::fill(std::copy_n(logits + start, count, padded), padded + kSegment, -INFINITY);
    return padded;
  }

  // The largest logit; NaN when the row is no distribution: it has a NaN or +inf, or nothing but -inf.
  float maximum() const {
    float result = -INFINITY;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      if (std::isnan(largest[chunk])) return NAN;
      result = std::max(result, largest[chunk]);
    }
    return result == -INFINITY ? NAN : result;
  }
};

OCTAVO_INLINE void find_largest_of_chunk(const Row& row, int64_t chunk) {
  constexpr int kChains = 4;
  float padded[kSegment];
  F32 best[kChains], faults[kChains] = {};
  for (F32& each : best) each = splat(-INFINITY);
  for (int64_t index = row.first_segment(chunk); index < row.end_segment(chunk); index++) {
    const float* logits = row.segment(index, padded);
    for (int64_t i = 0; i < kSegment; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; chain++) {
        const F32 value = load(logits + i + chain * kLanes);
        best[chain] = max(value, best[chain]);
        faults[chain] = fma(max(splat(-3.4e38f), value), splat(0.0f), faults[chain]);  // NaN of NaN and of +inf
      }
    }
  }
  const float fault = reduce_add((faults[0] + faults[1]) + (faults[2] + faults[3]));
  row.largest[chunk] = std::isnan(fault) ? NAN : reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
}

// The first phase of what is done with rows: the largest logit of each chunk.
OCTAVO_INLINE void find_largest(const Rows& rows, Work& work) {
  if (!are_inside(rows, work)) return;
  const int64_t num_chunks = rows.num_chunks(), num_items = work.num_rows * num_chunks;
  for (int64_t item = work.take(); item < num_items; item = work.take()) {
    find_largest_of_chunk(Row(rows, item / num_chunks), item % num_chunks);
  }
}

// The lowest token id with this logit, which is the row's largest.
OCTAVO_INLINE int64_t find_token(const Row& row, float maximum) {
  const int64_t chunk = std::find(row.largest, row.largest + row.num_chunks, maximum) - row.largest;
  float padded[kSegment];
  for (int64_t index = row.first_segment(chunk); index < row.end_segment(chunk); index++) {
    const float* logits = row.segment(index, padded);
    for (int64_t i = 0; i < kSegment; i += kLanes) {
      const uint32_t lanes = equal_lanes(load(logits + i), splat(maximum));
      if (lanes != 0) return index * kSegment + i + __builtin_ctz(lanes);
    }
  }
  return -1;
}

// Sum of fp32 numbers in float64, in an order that depends on their places only.
struct WideSum {
  F64x8 low{}, high{};

  void add(F32 value) {
    low += __builtin_convertvector(low_half(value), F64x8);
    high += __builtin_convertvector(high_half(value), F64x8);
  }
  double total() const {
    const F64x8 sum = low + high;
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
};

// A number that at least `count` numbers of the row are not below, given the maxima of its segments.
OCTAVO_INLINE float reached_by(const Row& row, int64_t count, float* scratch) {
  if (count > row.num_segments) return -INFINITY;
  float* last = std::copy_n(row.maxima, row.num_segments, scratch);
  std::nth_element(scratch, scratch + count - 1, last, std::greater<float>());
  return scratch[count - 1];
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
