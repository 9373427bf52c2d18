// Draws one token per row of logits: greedy, or by inverting the distribution function over the kept tokens.
//
// Three phases, between which all threads wait: the largest logit of each chunk; the sums of the weights of each
// segment; then each row is decided by one thread. Weights are not stored: a segment's are computed again where they
// are needed, which is in the segment that is drawn, or in those that have candidates.

#include "kernel.h"
#include "row_scan.h"
#include "sampling_cut.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int64_t kInvalidToken = -1;

struct SampleTokensArgs {
  const float* logits;        // [rows, vocab_size]
  const float* temperatures;  // [rows]; 0: greedy
  const int64_t* top_ks;      // [rows]; 0: all; null: nobody asks for it, as for the next two
  const double* top_ps;       // [rows]
  const float* min_ps;        // [rows]
  const double* uniforms;     // [rows]
  int64_t* token_ids;         // [rows]
  double* found;              // [rows, 2 · number of segments], see row_scan.h
  int64_t vocab_size;
};

bool is_greedy(float temperature) { return !(temperature > 0); }

// The options of one row that is not greedy.
struct Options {
  float maximum;  // logit
  float temperature;
  float min_p;
  int64_t top_k;  // vocab_size: all
  double top_p;

  Options(const SampleTokensArgs& args, int64_t row, float maximum)
      : maximum(maximum),
        temperature(args.temperatures[row]),
        min_p(args.min_ps == nullptr ? 0.0f : args.min_ps[row]),
        top_k(args.top_ks == nullptr ? 0 : args.top_ks[row]),
        top_p(args.top_ps == nullptr ? 1.0 : args.top_ps[row]) {
    if (top_k == 0 || top_k > args.vocab_size) top_k = args.vocab_size;
  }

  bool selects(int64_t vocab_size) const { return top_k < vocab_size || top_p < 1.0; }
};

// Weights of 16 tokens: 1 for the likeliest; 0 for what min_p leaves out.
OCTAVO_INLINE F32 weigh(F32 logits, const Options& options) {
  const F32 distance = logits - splat(options.maximum);
  // To divide by 1 takes as long as the rest.
  const F32 scaled = options.temperature == 1.0f ? distance : distance / splat(options.temperature);
  return zero_below(exp(scaled), splat(options.min_p));
}

void weigh_segment(const Row& row, int64_t index, const Options& options, float* weights) {
  float padded[kSegment];
  const float* logits = row.segment(index, padded);
  for (int64_t i = 0; i < kSegment; i += kLanes) store(weights + i, weigh(load(logits + i), options));
}

void sum_chunk(const Row& row, int64_t chunk, const Options& options) {
  float padded[kSegment];
  for (int64_t index = row.first_segment(chunk); index < row.end_segment(chunk); index++) {
    const float* logits = row.segment(index, padded);
    WideSum sum;
    F32 largest{};
    for (int64_t i = 0; i < kSegment; i += kLanes) {
      const F32 weights = weigh(load(logits + i), options);
      sum.add(weights);
      largest = max(weights, largest);
    }
    row.sums[index] = sum.total();
    row.maxima[index] = reduce_max(largest);
  }
}

// The first number at which the running sum of positive numbers exceeds `target`, which is below their sum.
int64_t invert(const float* weights, double target) {
  double total = 0;
  for (int64_t i = 0; i < kSegment; i++) total += weights[i];
  // Added up in another order, the segment's own sum may fall short of the rest of the target.
  target = std::min(target, std::nextafter(total, 0.0));
  double sum = weights[0];
  int64_t i = 0;
  while (sum <= target && i + 1 < kSegment) sum += weights[++i];
  return i;
}

double sum_of(const Row& row) {
  double sum = 0;
  for (int64_t index = 0; index < row.num_segments; index++) sum += row.sums[index];
  return sum;
}

int64_t draw_from_all(const Row& row, const Options& options, double uniform) {
  const double target = uniform * sum_of(row);
  double before = 0;
  int64_t index = 0;
  while (before + row.sums[index] <= target && index + 1 < row.num_segments) before += row.sums[index++];
  float weights[kSegment];
  weigh_segment(row, index, options, weights);
  return index * kSegment + invert(weights, target - before);
}

// Memory of one thread for the selection in one row.
struct Scratch {
  Candidate* candidates;  // [vocab_size + 1], by token id
  float* values;          // [vocab_size]
  int64_t num_candidates = 0;

  static int64_t num_bytes(int64_t vocab_size) {
    return (vocab_size + 1) * static_cast<int64_t>(sizeof(Candidate) + sizeof(float));
  }
  Scratch(void* memory, int64_t vocab_size)
      : candidates(static_cast<Candidate*>(memory)), values(reinterpret_cast<float*>(candidates + vocab_size + 1)) {}
};

// A weight below which no token can stay. With top_p alone, all tokens that weigh less than an equal share of what it
// leaves out weigh no more than that together; half of it leaves room for rounding.
float weight_of_candidates(const Row& row, const Options& options, float* scratch) {
  if (options.top_k < row.vocab_size) return reached_by(row, options.top_k, scratch);
  const double left_out = (1.0 - options.top_p) * sum_of(row);
  return static_cast<float>(0.5 * left_out / static_cast<double>(row.vocab_size));
}

// Lists the tokens with a positive weight of at least `lowest`.
void list_candidates(const Row& row, const Options& options, float lowest, Scratch& scratch) {
  lowest = std::max(lowest, std::numeric_limits<float>::min());
  float weights[kSegment];
  int64_t num = 0;
  for (int64_t index = 0; index < row.num_segments; index++) {
    if (row.maxima[index] < lowest) continue;
    weigh_segment(row, index, options, weights);
    const int64_t start = index * kSegment, count = std::min(kSegment, row.vocab_size - start);
    for (int64_t i = 0; i < count; i++) {
      scratch.candidates[num] = {weights[i], static_cast<int32_t>(start + i)};
      num += weights[i] >= lowest;
    }
  }
  scratch.num_candidates = num;
}

Cut cut_candidates(const Scratch& scratch, const Limits& limits) {
  for (int64_t i = 0; i < scratch.num_candidates; i++) scratch.values[i] = scratch.candidates[i].value;
  return find_cut(scratch.values, scratch.num_candidates, limits);
}

// What top_k, and of that top_p, keeps.
Cut select_candidates(const Row& row, const Options& options, const Scratch& scratch) {
  if (options.top_k == row.vocab_size) return cut_candidates(scratch, {options.top_k, options.top_p * sum_of(row)});
  const Cut likeliest = cut_candidates(scratch, {options.top_k, INFINITY});
  if (options.top_p >= 1.0) return likeliest;
  return cut_candidates(scratch, {options.top_k, options.top_p * likeliest.sum});
}

// Removes the candidates that do not stay; among equals of the last the lowest ids stay.
void keep(Scratch& scratch, const Cut& cut) {
  int64_t num = 0, num_equal = 0;
  for (int64_t i = 0; i < scratch.num_candidates; i++) {
    const Candidate candidate = scratch.candidates[i];
    const bool is_equal = candidate.value == cut.value;
    scratch.candidates[num] = candidate;
    // Without branches: which candidates stay cannot be foreseen.
    num += int{candidate.value > cut.value} | (int{is_equal} & int{num_equal < cut.num_equal});
    num_equal += is_equal;
  }
  scratch.num_candidates = num;
}

int64_t draw_from_likeliest(const Row& row, const Options& options, double uniform, Scratch& scratch) {
  list_candidates(row, options, weight_of_candidates(row, options, scratch.values), scratch);
  keep(scratch, select_candidates(row, options, scratch));
  double total = 0;
  for (int64_t i = 0; i < scratch.num_candidates; i++) total += scratch.candidates[i].value;
  const double target = uniform * total;
  double sum = scratch.candidates[0].value;
  int64_t i = 0;
  while (sum <= target && i + 1 < scratch.num_candidates) sum += scratch.candidates[++i].value;
  return scratch.candidates[i].token_id;
}

int64_t decide(const SampleTokensArgs& args, const Row& row, int64_t index, Scratch& scratch) {
  const float maximum = row.maximum();
  if (std::isnan(maximum)) return kInvalidToken;
  if (is_greedy(args.temperatures[index])) return find_token(row, maximum);
  const Options options(args, index, maximum);
  const double uniform = args.uniforms[index];
  return options.selects(row.vocab_size) ? draw_from_likeliest(row, options, uniform, scratch)
                                         : draw_from_all(row, options, uniform);
}

Rows rows_of(const SampleTokensArgs& args) { return {args.logits, args.found, args.vocab_size}; }

OCTAVO_KERNEL(sample_tokens, SampleTokensArgs) { find_largest(rows_of(args), work); }

OCTAVO_PHASE(sample_tokens, 2, SampleTokensArgs) {
  if (std::all_of(args.temperatures, args.temperatures + work.num_rows, is_greedy)) return;
  const Rows rows = rows_of(args);
  const int64_t num_chunks = rows.num_chunks(), num_items = work.num_rows * num_chunks;
  for (int64_t item = work.take(); item < num_items; item = work.take()) {
    const int64_t index = item / num_chunks;
    if (is_greedy(args.temperatures[index])) continue;
    const Row row(rows, index);
    const float maximum = row.maximum();
    if (!std::isnan(maximum)) sum_chunk(row, item % num_chunks, Options(args, index, maximum));
  }
}

OCTAVO_PHASE(sample_tokens, 3, SampleTokensArgs) {
  void* memory = work.scratch(Scratch::num_bytes(args.vocab_size));
  if (memory == nullptr) return;
  Scratch scratch(memory, args.vocab_size);
  for (int64_t index = work.take(); index < work.num_rows; index = work.take()) {
    args.token_ids[index] = decide(args, Row(rows_of(args), index), index, scratch);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
