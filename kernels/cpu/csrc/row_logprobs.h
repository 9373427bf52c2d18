// Logprobs of rows of logits: what is found out of all rows, chunk by chunk, before a logit can become a logprob.
//
// Who needs logprobs uses these phases, so that a token of a row has the same bits in every kernel.
#pragma once

#include "row_scan.h"

namespace octavo {
namespace OCTAVO_ISA {

// A weight is 1 for the likeliest token.
OCTAVO_INLINE void sum_chunk_of_weights(const Row& row, int64_t chunk, float maximum) {
  float padded[kSegment];
  for (int64_t index = row.first_segment(chunk); index < row.end_segment(chunk); index++) {
    const float* logits = row.segment(index, padded);
    WideSum sum;
    F32 largest = splat(-INFINITY);
    for (int64_t i = 0; i < kSegment; i += kLanes) {
      const F32 value = load(logits + i);
      sum.add(exp(value - splat(maximum)));
      largest = max(value, largest);
    }
    row.sums[index] = sum.total();
    row.maxima[index] = reduce_max(largest);
  }
}

// The phase behind `find_largest`: the sum of the weights of each segment, and its largest logit.
OCTAVO_INLINE void sum_weights(const Rows& rows, Work& work) {
  if (!are_inside(rows, work)) return;
  const int64_t num_chunks = rows.num_chunks(), num_items = work.num_rows * num_chunks;
  for (int64_t item = work.take(); item < num_items; item = work.take()) {
    const Row row(rows, item / num_chunks);
    const float maximum = row.maximum();
    if (!std::isnan(maximum)) sum_chunk_of_weights(row, item % num_chunks, maximum);
  }
}

// Logits of a row to logprobs, behind `sum_weights`.
struct Logprobs {
  float maximum;
  float log_sum;

  Logprobs(const Row& row, float maximum) : maximum(maximum) {
    double total = 0;
    for (int64_t index = 0; index < row.num_segments; index++) total += row.sums[index];
    log_sum = static_cast<float>(std::log(total));
  }
  float of(float logit) const { return (logit - maximum) - log_sum; }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
