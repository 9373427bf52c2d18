// Products of bfloat16 activations with weights of GGUF blocks that are widened for the tile unit: with AMX only.

#include "grouped_widened.h"
#include "kernel.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct WidenedLinearArgs {
  const bf16* x;  // [rows, num_inputs]
  int64_t x_is_bf16;
  GroupedWeight weight;
  LinearOutput output;
};

OCTAVO_KERNEL(widened_linear, WidenedLinearArgs) {
  if (work.num_rows == 0) return;
  with_format(args.weight, [&](auto format) {
    using Format = decltype(format);
    const RowsOfX x{args.x, args.weight.num_inputs};
    const Split split = split_of<Format>(args.weight, args.weight.num_inputs * sizeof(bf16), work);
    const WidenedPanels<Format> panels{args.weight};
    Tiles tiles;
    // The next item is taken before this one is computed, so that its weights are on their way from memory.
    for (int64_t index = work.take(), next = 0; index < split.num_items(); index = next) {
      next = work.take();
      if (next < split.num_items()) panels.ask_for(split.item(next).first_panel);
      compute_with_tiles(x, panels, args.output, work, split.item(index), tiles);
    }
  });
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
