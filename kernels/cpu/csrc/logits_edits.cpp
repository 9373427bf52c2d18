// What requests do to their logits before a token is drawn: forbidden tokens, bias, penalties; in place.
//
// Three phases: banned pairs; biased pairs; then mask and penalties, in chunks of rows. The mask may come behind the
// bias, because -inf stays -inf whatever finite number is added. Each logit has its own changes, so who makes them is
// all the same.

#include "kernel.h"
#include "row_scan.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int64_t kPairsOfItem = 256;
constexpr int64_t kTokensOfWord = 32;
constexpr int64_t kTokensOfItem = kSegment * kSegmentsOfChunk;
constexpr int32_t kAllAllowed = -1;
constexpr int32_t kInOutput = 0x7fffffff;  // bits of a count that say how often; the other one: the prompt has it
constexpr int32_t kInfinityBits = 0x7f800000;

struct EditLogitsArgs {
  float* logits;              // [rows, vocab_size]
  const int32_t* bitmask;     // [num_masks, words of 32 tokens], lowest bit first; null: there are none
  const int64_t* mask_rows;   // [rows]; negative: all tokens may be drawn
  const int64_t* banned;      // [2, num_banned], rows and token ids, each pair once
  const int64_t* biased;      // [2, num_biased], the same
  const float* biases;        // [num_biased]
  const int32_t* counts;      // [num_count_rows, vocab_size]; null: no penalties
  const int64_t* count_rows;  // [rows]; negative: no penalties
  const float* repetition;    // [rows]
  const float* presence;      // [rows]
  const float* frequency;     // [rows]
  int64_t vocab_size;
  int64_t num_masks;
  int64_t num_banned;
  int64_t num_biased;
  int64_t num_count_rows;
};

// Adds value_of(i) to the logit of the i-th pair.
template <class ValueOf>
void add_to_pairs(const EditLogitsArgs& args, const int64_t* pairs, int64_t num_pairs, ValueOf value_of, Work& work) {
  for (int64_t first = work.take() * kPairsOfItem; first < num_pairs; first = work.take() * kPairsOfItem) {
    for (int64_t i = first; i < std::min(num_pairs, first + kPairsOfItem); i++) {
      const int64_t row = pairs[i], token_id = pairs[num_pairs + i];
      const bool is_inside = row >= 0 && row < work.num_rows && token_id >= 0 && token_id < args.vocab_size;
      if (!is_inside) return work.fail(Failure::kIndexOutOfRange);
      args.logits[row * args.vocab_size + token_id] += value_of(i);
    }
  }
}

// What one row asks for.
struct RowEdits {
  const int32_t* mask = nullptr;    // null: all tokens may be drawn
  const int32_t* counts = nullptr;  // null: no penalties
  F32 repetition{}, presence{}, frequency{};

  RowEdits(const EditLogitsArgs& args, int64_t row) {
    const int64_t num_words = (args.vocab_size + kTokensOfWord - 1) / kTokensOfWord;
    if (args.bitmask != nullptr && args.mask_rows[row] >= 0) mask = args.bitmask + args.mask_rows[row] * num_words;
    if (args.counts == nullptr || args.count_rows[row] < 0) return;
    counts = args.counts + args.count_rows[row] * args.vocab_size;
    repetition = splat(args.repetition[row]);
    presence = splat(args.presence[row]);
    frequency = splat(args.frequency[row]);
  }

  bool changes_nothing() const { return mask == nullptr && counts == nullptr; }
};

bool are_edits_inside(const EditLogitsArgs& args, int64_t row) {
  return (args.bitmask == nullptr || args.mask_rows[row] < args.num_masks) &&
         (args.counts == nullptr || args.count_rows[row] < args.num_count_rows);
}

// Conditions are -1 or 0 in each lane, made without comparisons: those of 16 lanes become 16 of single numbers where
// registers are narrower.
OCTAVO_INLINE I32 is_negative(I32 value) { return value >> 31; }
OCTAVO_INLINE F32 either(I32 condition, F32 yes, F32 no) {
  return (F32)((condition & (I32)yes) | (~condition & (I32)no));
}

// Logits whose bit among the lowest 16 is 0 become -inf, and stay what they are if NaN.
OCTAVO_INLINE F32 mask(F32 logits, int32_t bits) {
  constexpr I32 kBits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return logits - (F32)(is_negative((kBits & bits) - 1) & kInfinityBits);
}

OCTAVO_INLINE F32 penalize(F32 logits, I32 counts, const RowEdits& edits) {
  const F32 one = splat(1.0f);
  const I32 is_below = is_negative((I32)logits), num_in_output = counts & kInOutput;
  const I32 is_in_output = is_negative(-num_in_output), is_seen = is_in_output | is_negative(counts);
  F32 result = logits * either(is_below, edits.repetition, one) / either(is_below, one, edits.repetition);
  result = result - __builtin_convertvector(num_in_output, F32) * edits.frequency;
  result = result - either(is_in_output, edits.presence, F32{});
  return either(is_seen, result, logits);
}

OCTAVO_INLINE I32 load_counts(const int32_t* from, int64_t count) {
  I32 counts{};
  std::memcpy(&counts, from, count * sizeof(int32_t));
  return counts;
}

OCTAVO_INLINE bool has_any(const int32_t* counts, int64_t num_tokens) {
  int32_t any = 0;
  for (int64_t i = 0; i < num_tokens; i++) any |= counts[i];
  return any != 0;
}

// Up to 16 tokens from `start` on; bits of the mask that are not theirs may be anything.
OCTAVO_INLINE void edit_lanes(const RowEdits& edits, float* logits, int64_t start, int64_t count, int32_t bits,
                              bool has_counts) {
  F32 values = mask(load_first(logits + start, count), bits);
  if (has_counts) values = penalize(values, load_counts(edits.counts + start, count), edits);
  store_first(logits + start, values, count);
}

// Tokens of one word of the mask. Most have no counts, and are then not written unless the mask forbids some.
OCTAVO_INLINE void edit_word(const RowEdits& edits, float* logits, int64_t start, int64_t num_tokens) {
  const int32_t word = edits.mask == nullptr ? kAllAllowed : edits.mask[start / kTokensOfWord];
  const bool has_counts = edits.counts != nullptr && has_any(edits.counts + start, num_tokens);
  if (word == kAllAllowed && !has_counts) return;
  int64_t i = 0;
  for (; i + kLanes <= num_tokens; i += kLanes) edit_lanes(edits, logits, start + i, kLanes, word >> i, has_counts);
  if (i < num_tokens) edit_lanes(edits, logits, start + i, num_tokens - i, word >> i, has_counts);
}

void edit_chunk(const RowEdits& edits, float* logits, int64_t start, int64_t end) {
  for (; start + kTokensOfWord <= end; start += kTokensOfWord) edit_word(edits, logits, start, kTokensOfWord);
  if (start < end) edit_word(edits, logits, start, end - start);
}

OCTAVO_KERNEL(edit_logits, EditLogitsArgs) {
  add_to_pairs(args, args.banned, args.num_banned, [](int64_t) { return -INFINITY; }, work);
}

OCTAVO_PHASE(edit_logits, 2, EditLogitsArgs) {
  add_to_pairs(args, args.biased, args.num_biased, [&](int64_t i) { return args.biases[i]; }, work);
}

OCTAVO_PHASE(edit_logits, 3, EditLogitsArgs) {
  if (args.bitmask == nullptr && args.counts == nullptr) return;
  const int64_t num_chunks = (args.vocab_size + kTokensOfItem - 1) / kTokensOfItem;
  const int64_t num_items = work.num_rows * num_chunks;
  for (int64_t item = work.take(); item < num_items; item = work.take()) {
    const int64_t row = item / num_chunks, start = item % num_chunks * kTokensOfItem;
    if (!are_edits_inside(args, row)) return work.fail(Failure::kIndexOutOfRange);
    const RowEdits edits(args, row);
    const int64_t end = std::min(args.vocab_size, start + kTokensOfItem);
    if (!edits.changes_nothing()) edit_chunk(edits, args.logits + row * args.vocab_size, start, end);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
