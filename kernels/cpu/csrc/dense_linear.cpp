// Products with bfloat16 and fp32 weights, packing of their rows, and rows of an embedding.

#include "bf16_tiles.h"
#include "dense_rows.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#if defined(OCTAVO_AMX)

// The panels of a dense weight, as `compute_with_tiles` wants them.
struct DensePanels {
  static constexpr bool kAsksAhead = false;
  static constexpr int64_t kStepsAlone = 1 << 20;  // all
  static constexpr int64_t kHeldStepBytes = kStepBytes, kScratchBytes = 0;

  const DenseWeight& weight;

  const char* held(int64_t panel, int64_t step) const { return panel_of(weight, panel) + step * kStepBytes; }
  const char* get(int64_t panel, int64_t step, int64_t, char*) const { return held(panel, step); }
};

#endif

OCTAVO_KERNEL(dense_linear, DenseLinearArgs) {
  if (work.num_rows == 0) return;
  const DenseWeight& weight = args.weight;
  const int64_t row_bytes = weight.num_inputs * (weight.is_bf16 ? sizeof(bf16) : sizeof(float));
  const Split split(num_panels(weight.num_outputs, weight.is_gated), panel_bytes(weight), work.num_rows, row_bytes,
                    work.num_threads());
#if defined(OCTAVO_AMX)
  Tiles tiles;
#endif
  for (int64_t index = work.take(); index < split.num_items(); index = work.take()) {
    const Item item = split.item(index);
    if (!args.weight.is_bf16) {
      compute_with<Fp32Step>(args, work, item);
    } else {
#if defined(OCTAVO_AMX)
      const RowsOfX x{static_cast<const bf16*>(args.x), weight.num_inputs};
      compute_with_tiles(x, DensePanels{weight}, args.output, work, item, tiles);
#else
      compute_with<Bf16Step>(args, work, item);
#endif
    }
  }
}

// Where the weights of an output begin: those of the next inputs are `kPanelColumns` further, as 32 bits for a pair of
// bfloat16 numbers.
uint32_t* column_of(const DenseWeight& weight, int64_t output) {
  const Place place = place_of(output, weight.num_outputs, weight.is_gated);
  char* panel = static_cast<char*>(weight.panels) + place.panel * panel_bytes(weight);
  return reinterpret_cast<uint32_t*>(panel) + place.column;
}

struct DensePackArgs {
  DenseWeight weight;
  const void* rows;  // [rows, num_inputs] of the dtype of the weight
  int64_t first_row;
};

// Neighbours in a panel are packed together, because their weights are.
OCTAVO_KERNEL(dense_pack, DensePackArgs) {
  const DenseWeight& weight = args.weight;
  const int64_t row_bytes = weight.num_inputs * (weight.is_bf16 ? sizeof(bf16) : sizeof(float));
  const int64_t num_items = divide_up(work.num_rows, kLanes);
  for (int64_t item = work.take(); item < num_items; item = work.take()) {
    const int64_t first = item * kLanes;
    const int num_rows = static_cast<int>(clamp(work.num_rows - first, 0, kLanes));
    const char* from = static_cast<const char*>(args.rows) + first * row_bytes;
    uint32_t* to[kLanes];
    for (int row = 0; row < num_rows; row++) to[row] = column_of(weight, args.first_row + first + row);
    for (int64_t i = 0; i < row_bytes; i += sizeof(uint32_t)) {
      const int64_t step = i / static_cast<int64_t>(sizeof(uint32_t)) * kPanelColumns;
      const int64_t count = clamp(row_bytes - i, 0, sizeof(uint32_t));
      for (int row = 0; row < num_rows; row++) std::memcpy(to[row] + step, from + row * row_bytes + i, count);
    }
  }
}

struct DenseEmbeddingArgs {
  DenseWeight weight;
  const int64_t* token_ids;  // [rows]
  void* to;                  // [rows, num_inputs]
  int64_t is_bf16;
};

template <class T>
void copy_weights(const DenseWeight& weight, int64_t output, T* to) {
  const uint32_t* column = column_of(weight, output);
  for (int64_t i = 0; i < weight.num_inputs; i++) {
    const uint32_t bits = column[(weight.is_bf16 ? i / 2 : i) * kPanelColumns];
    const uint32_t wide = !weight.is_bf16 ? bits : i % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
    if constexpr (sizeof(T) == sizeof(float)) {
      std::memcpy(to + i, &wide, sizeof wide);
    } else {
      float value;
      std::memcpy(&value, &wide, sizeof value);
      store_first(to + i, splat(value), 1);
    }
  }
}

OCTAVO_KERNEL(dense_embedding, DenseEmbeddingArgs) {
  for (int64_t row = work.take(); row < work.num_rows; row = work.take()) {
    const int64_t token_id = args.token_ids[row], start = row * args.weight.num_inputs;
    if (token_id < 0 || token_id >= args.weight.num_outputs) {
      work.fail(Failure::kIndexOutOfRange);
    } else if (args.is_bf16) {
      copy_weights(args.weight, token_id, static_cast<bf16*>(args.to) + start);
    } else {
      copy_weights(args.weight, token_id, static_cast<float*>(args.to) + start);
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
