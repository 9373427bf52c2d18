// The logprobs of given tokens, each in a row of logits.

#include "kernel.h"
#include "row_logprobs.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct TokenLogprobsArgs {
  const float* logits;       // [num_logits_rows, vocab_size]
  const int64_t* places;     // [tokens], of each token's row among the logits
  const int64_t* token_ids;  // [tokens]; negative: no token
  float* logprobs;           // [tokens]; NaN where there is no token or no distribution
  double* found;             // [tokens, 2 · number of segments], see row_scan.h
  int64_t num_logits_rows;
  int64_t vocab_size;
};

Rows rows_of(const TokenLogprobsArgs& args) {
  return {args.logits, args.found, args.vocab_size, args.places, args.num_logits_rows};
}

float logprob_of(const TokenLogprobsArgs& args, int64_t index) {
  const Row row(rows_of(args), index);
  const float maximum = row.maximum();
  if (args.token_ids[index] < 0 || std::isnan(maximum)) return NAN;
  return Logprobs(row, maximum).of(row.logits[args.token_ids[index]]);
}

OCTAVO_KERNEL(token_logprobs, TokenLogprobsArgs) { find_largest(rows_of(args), work); }

OCTAVO_PHASE(token_logprobs, 2, TokenLogprobsArgs) { sum_weights(rows_of(args), work); }

OCTAVO_PHASE(token_logprobs, 3, TokenLogprobsArgs) {
  if (!are_inside(rows_of(args), work)) return;
  for (int64_t index = work.take(); index < work.num_rows; index = work.take()) {
    if (args.token_ids[index] >= args.vocab_size) {
      work.fail(Failure::kIndexOutOfRange);
      continue;
    }
    args.logprobs[index] = logprob_of(args, index);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
