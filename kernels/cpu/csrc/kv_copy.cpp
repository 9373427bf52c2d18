// Copies of whole KV blocks, over all layers, keys and values.

#include <cstring>

#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct CopyBlocksArgs {
  const char* source;   // [num_parts, num_source_blocks, block_bytes]
  char* destination;    // [num_parts, num_destination_blocks, block_bytes]
  const int64_t* pairs;  // [rows, 2]: source block, destination block; no block that is written is read
  int64_t num_parts;
  int64_t num_source_blocks;
  int64_t num_destination_blocks;
  int64_t block_bytes;
};

OCTAVO_KERNEL(copy_blocks, CopyBlocksArgs) {
  for (int64_t item = work.take(); item < work.num_rows * args.num_parts; item = work.take()) {
    const int64_t part = item / work.num_rows, pair = item % work.num_rows;
    const int64_t from = args.pairs[2 * pair], to = args.pairs[2 * pair + 1];
    if (from < 0 || from >= args.num_source_blocks || to < 0 || to >= args.num_destination_blocks) {
      work.fail(Failure::kIndexOutOfRange);
      continue;
    }
    const char* source = args.source + (part * args.num_source_blocks + from) * args.block_bytes;
    std::memcpy(args.destination + (part * args.num_destination_blocks + to) * args.block_bytes, source, args.block_bytes);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
