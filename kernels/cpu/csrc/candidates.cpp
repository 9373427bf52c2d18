// The likeliest tokens of rows of logits, likeliest first, with their logprobs.
//
// Logprobs do not fall where logits rise, so a logit that enough tokens reach says which logprobs are worth a look.
// What is listed is told apart by logprob, then by token id.

#include "kernel.h"
#include "row_logprobs.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct LikeliestTokensArgs {
  const float* logits;    // [num_logits_rows, vocab_size]
  const int64_t* places;  // [rows], of each row among the logits; null: the first ones are meant
  const int64_t* masked;  // [2, num_masked], rows and token ids that are not listed; null: there are none
  int64_t* token_ids;     // [rows, num_listed]; -1 where there is no further token
  float* logprobs;        // [rows, num_listed]; -inf there
  double* found;          // [rows, 2 · number of segments], see row_scan.h
  int64_t num_logits_rows;
  int64_t vocab_size;
  int64_t num_masked;
  int64_t num_listed;
};

// Lists possible tokens with a logprob of at least `lowest`, by token id.
int64_t list_from(const Row& row, const Logprobs& logprobs, float lowest, Candidate* listed) {
  int64_t num = 0;
  for (int64_t index = 0; index < row.num_segments; index++) {
    if (logprobs.of(row.maxima[index]) < lowest) continue;
    const int64_t start = index * kSegment, end = std::min(row.vocab_size, start + kSegment);
    for (int64_t token_id = start; token_id < end; token_id++) {
      const float logprob = logprobs.of(row.logits[token_id]);
      listed[num] = {logprob, static_cast<int32_t>(token_id)};
      num += logprob >= lowest && logprob > -INFINITY;
    }
  }
  return num;
}

// The masks of one row.
struct Masks {
  const LikeliestTokensArgs& args;
  int64_t row;
  int64_t count;

  Masks(const LikeliestTokensArgs& args, int64_t row)
      : args(args), row(row), count(std::count(args.masked, args.masked + args.num_masked, row)) {}

  int64_t remove_from(Candidate* listed, int64_t num) const {
    if (count == 0) return num;
    for (int64_t i = 0; i < args.num_masked; i++) {
      if (args.masked[i] != row) continue;
      const auto is_before = [](const Candidate& each, int64_t token_id) { return each.token_id < token_id; };
      Candidate* place = std::lower_bound(listed, listed + num, args.masked[args.num_masked + i], is_before);
      if (place != listed + num && place->token_id == args.masked[args.num_masked + i]) place->value = -INFINITY;
    }
    const auto is_masked = [](const Candidate& each) { return each.value == -INFINITY; };
    return std::remove_if(listed, listed + num, is_masked) - listed;
  }
};

bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.token_id < b.token_id;
}

// Returns how many tokens stand in `listed`, sorted, at most num_listed.
int64_t list_likeliest(const LikeliestTokensArgs& args, const Row& row, int64_t index, Candidate* listed,
                       float* scratch) {
  const float maximum = row.maximum();
  if (std::isnan(maximum)) return 0;
  const Logprobs logprobs(row, maximum);
  const Masks masks(args, index);
  const int64_t num_wanted = args.num_listed + masks.count;
  const float lowest = logprobs.of(reached_by(row, num_wanted, scratch));
  const int64_t num = masks.remove_from(listed, list_from(row, logprobs, lowest, listed));
  const int64_t num_listed = std::min(num, args.num_listed);
  std::partial_sort(listed, listed + num_listed, listed + num, is_likelier);
  return num_listed;
}

Rows rows_of(const LikeliestTokensArgs& args) {
  return {args.logits, args.found, args.vocab_size, args.places, args.num_logits_rows};
}

OCTAVO_KERNEL(likeliest_tokens, LikeliestTokensArgs) { find_largest(rows_of(args), work); }

OCTAVO_PHASE(likeliest_tokens, 2, LikeliestTokensArgs) { sum_weights(rows_of(args), work); }

OCTAVO_PHASE(likeliest_tokens, 3, LikeliestTokensArgs) {
  const Rows rows = rows_of(args);
  if (!are_inside(rows, work)) return;
  const int64_t max_listed = args.vocab_size + 1, candidate_bytes = sizeof(Candidate), number_bytes = sizeof(float);
  void* memory = work.scratch(max_listed * candidate_bytes + rows.num_segments() * number_bytes);
  if (memory == nullptr) return;
  auto* listed = static_cast<Candidate*>(memory);
  auto* scratch = reinterpret_cast<float*>(listed + max_listed);
  for (int64_t index = work.take(); index < work.num_rows; index = work.take()) {
    const int64_t num = list_likeliest(args, Row(rows, index), index, listed, scratch);
    for (int64_t i = 0; i < args.num_listed; i++) {
      args.token_ids[index * args.num_listed + i] = i < num ? listed[i].token_id : -1;
      args.logprobs[index * args.num_listed + i] = i < num ? listed[i].value : -INFINITY;
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
