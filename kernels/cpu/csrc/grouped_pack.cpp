// Packing of GGUF blocks into panels, and rows of an embedding from there.

#include "grouped_layout.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr uint32_t kSignBits = 0x80808080u;

// The parts of one block in a group of a panel: where its first head and its first word of codes are.
struct BlockPlace {
  char* head;
  char* words;
};

template <class Format>
BlockPlace block_place(const GroupedWeight& weight, int64_t output, int64_t group) {
  const Place place = place_of(output, weight.num_outputs, weight.is_gated);
  char* start = grouped_panel<Format>(weight, place.panel) + group * kPanelGroupBytes<Format>;
  char* codes = const_cast<char*>(panel_codes<Format>(start, place.column / kLanes));
  return {start + 2 * place.column, codes + 4 * (place.column % kLanes)};
}

template <class Format>
void pack_row(const GroupedWeight& weight, int64_t output, const char* from) {
  for (int64_t group = 0; group < weight.num_inputs / kGroupInputs; group++) {
    const BlockPlace to = block_place<Format>(weight, output, group);
    for (int i = 0; i < kHeads<Format>; i++) std::memcpy(to.head + i * 2 * kPanelColumns, from + 2 * i, 2);
    from += 2 * kHeads<Format>;
    for (int i = 0; i < Format::kWords; i++, from += 4) {
      uint32_t word;
      std::memcpy(&word, from, sizeof word);
      if constexpr (Format::kZeroCode == 128) word ^= kSignBits;
      std::memcpy(to.words + i * kVectorBytes, &word, sizeof word);
    }
  }
}

struct GroupedPackArgs {
  GroupedWeight weight;
  const char* rows;  // blocks of [rows][num_inputs / 32]
  int64_t first_row;
};

OCTAVO_KERNEL(grouped_pack, GroupedPackArgs) {
  const int64_t num_items = divide_up(work.num_rows, kLanes);
  with_format(args.weight, [&](auto format) {
    using Format = decltype(format);
    const int64_t row_bytes = args.weight.num_inputs / kGroupInputs * kFileBlockBytes<Format>;
    for (int64_t item = work.take(); item < num_items; item = work.take()) {
      const int64_t end = (item + 1) * kLanes < work.num_rows ? (item + 1) * kLanes : work.num_rows;
      for (int64_t row = item * kLanes; row < end; row++) {
        pack_row<Format>(args.weight, args.first_row + row, args.rows + row * row_bytes);
      }
    }
  });
}

// A block as fp32 numbers, each rounded as the product and then the sum that define it.
template <class Format>
void widen_block(const BlockPlace& block, float (&weights)[kGroupInputs]) {
  uint16_t heads[kLanes] = {};
  for (int i = 0; i < kHeads<Format>; i++) std::memcpy(heads + i, block.head + i * 2 * kPanelColumns, 2);
  const F32 widened = load_halves(heads);
  for (int i = 0; i < kGroupInputs; i++) {
    const int word = Format::kWords == 8 ? i / 4 : i % 16 / 4;
    const uint8_t byte = static_cast<uint8_t>(block.words[word * kVectorBytes + i % 4]);
    const int code = Format::kWords == 8 ? byte : i < 16 ? byte & 15 : byte >> 4;
    weights[i] = static_cast<float>(code - Format::kZeroCode) * widened[0];
    if constexpr (Format::kHasMinimum) weights[i] += widened[1];
  }
}

template <class Format, class T>
void widen_row(const GroupedWeight& weight, int64_t output, T* to) {
  for (int64_t group = 0; group < weight.num_inputs / kGroupInputs; group++, to += kGroupInputs) {
    float weights[kGroupInputs];
    widen_block<Format>(block_place<Format>(weight, output, group), weights);
    store(to, load(weights));
    store(to + kLanes, load(weights + kLanes));
  }
}

struct GroupedEmbeddingArgs {
  GroupedWeight weight;
  const int64_t* token_ids;  // [rows]
  void* to;                  // [rows, num_inputs]
  int64_t is_bf16;
};

OCTAVO_KERNEL(grouped_embedding, GroupedEmbeddingArgs) {
  with_format(args.weight, [&](auto format) {
    using Format = decltype(format);
    for (int64_t row = work.take(); row < work.num_rows; row = work.take()) {
      const int64_t token_id = args.token_ids[row], start = row * args.weight.num_inputs;
      if (token_id < 0 || token_id >= args.weight.num_outputs) {
        work.fail(Failure::kIndexOutOfRange);
      } else if (args.is_bf16) {
        widen_row<Format>(args.weight, token_id, static_cast<bf16*>(args.to) + start);
      } else {
        widen_row<Format>(args.weight, token_id, static_cast<float*>(args.to) + start);
      }
    }
  });
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
