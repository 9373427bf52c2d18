// What attention is given, its items of work, and what an item reads.
//
// An item is some queries, the query heads of one KV head, and a range of chunks of 128 keys. The queries are neighbours
// of one request, which see all keys up to their own; or the last ones of several requests that have the keys of these
// chunks in the same blocks, or of one, whose results of each chunk are joined later.
#pragma once

#include "attention_softmax.h"

namespace octavo {
namespace OCTAVO_ISA {

struct AttentionArgs {
  KvCache cache;
  const void* query;                 // [tokens, num_query_heads, head_dim]
  const int32_t* query_start_loc;    // [requests + 1]
  const int32_t* seq_lens;           // [requests]
  const int32_t* block_tables;       // [requests, ...]
  const float* kv_scales;            // [2], for fp8
  const int32_t* work;               // [num_work, 4], see `read_item`; ends with -1
  const int32_t* reductions;         // [num_reductions, 4]: request, first query, first partial result, unused
  float* partials;                   // [partials, num_query_heads, padded head_dim + 16]: sums, largest, total
  void* out;                         // [tokens, num_query_heads, head_dim]
  int64_t query_stride;              // numbers from a token to the next
  int64_t block_table_stride;
  int64_t num_work;
  int64_t num_reductions;
  int64_t max_item_queries;
  int64_t num_query_heads;
  int64_t window;                    // 0: none
  int64_t is_bf16;                   // query and out are bfloat16, else fp32
  float scale;
  float soft_cap;                    // 0: none
};

struct Item {
  int64_t request;            // in whose block table the keys are found
  int64_t head;               // of the keys
  int64_t first_token;        // of the step's
  int64_t num_queries;
  int64_t position;           // of the first query in its request
  int64_t first_chunk;
  int64_t end_chunk;
  const int32_t* reductions;  // one for each query, of a request each; null: the result goes out

  bool is_partial() const { return reductions != nullptr; }
  const int32_t* reduction(int64_t query) const { return reductions + 4 * query; }
};

struct Geometry {
  int64_t dim;    // head size, rounded up to a multiple of 16
  int64_t group;  // query heads to a KV head
  int64_t max_rows;
  int64_t partial_stride;  // numbers from a query head's partial result to the next

  explicit Geometry(const AttentionArgs& args)
      : dim((args.cache.head_dim + kLanes - 1) / kLanes * kLanes),
        group(args.num_query_heads / args.cache.num_kv_heads),
        max_rows((args.max_item_queries * group + kRows - 1) / kRows * kRows),
        partial_stride(dim + kLanes) {}
};

// Where an item's partial result of one chunk is, for query head `head`.
OCTAVO_INLINE float* partial_at(const AttentionArgs& args, const Geometry& geometry, int64_t partial, int64_t head) {
  return args.partials + (partial * args.num_query_heads + head) * geometry.partial_stride;
}

// The token of the step which is an item's query.
OCTAVO_INLINE int64_t token_of(const AttentionArgs& args, const Item& item, int64_t query) {
  if (!item.is_partial()) return item.first_token + query;
  return args.query_start_loc[item.reduction(query)[0]] + item.reduction(query)[1];
}

// The position of an item's query in its request.
OCTAVO_INLINE int64_t position_of(const AttentionArgs& args, const Item& item, int64_t query) {
  return item.is_partial() ? args.seq_lens[item.reduction(query)[0]] - 1 : item.position + query;
}

OCTAVO_INLINE int64_t chunks_up_to(int64_t position) { return position / kChunkTokens + 1; }

// Reads item `index`; false when there are no more. A row of work is (request, first query, first chunk, -1), or (first
// reduction, minus the number of reductions, first chunk, number of chunks).
OCTAVO_INLINE bool read_item(const AttentionArgs& args, const Geometry& geometry, int64_t index, Item& item) {
  const int64_t row = index / args.cache.num_kv_heads, head = index % args.cache.num_kv_heads;
  const int32_t* work = args.work + 4 * row;
  if (row >= args.num_work || work[0] < 0) return false;
  if (work[1] < 0) {
    const int32_t* reductions = args.reductions + 4 * work[0];
    const int64_t position = args.seq_lens[reductions[0]] - 1, last = chunks_up_to(position);
    const int64_t end = work[2] + work[3];
    item = {reductions[0], head, 0, -work[1], position, work[2], end < last ? end : last, reductions};
    return true;
  }
  const int64_t request = work[0], first_query = work[1];
  const int64_t first_token = args.query_start_loc[request], end_token = args.query_start_loc[request + 1];
  const int64_t left = end_token - first_token - first_query, position = args.seq_lens[request] - left;
  item = {request, head, first_token + first_query, left < args.max_item_queries ? left : args.max_item_queries,
          position, work[2], 0, nullptr};
  item.end_chunk = chunks_up_to(position + item.num_queries - 1);
  if (args.window > 0 && position >= args.window) {
    const int64_t first_visible = (position - args.window + 1) / kChunkTokens;
    if (first_visible > item.first_chunk) item.first_chunk = first_visible;
  }
  return true;
}

// The positions that any query of the item sees.
struct Visible {
  int64_t begin;
  int64_t end;
};
OCTAVO_INLINE Visible visible_of(const AttentionArgs& args, const Item& item) {
  int64_t first = item.position, last = item.position + (item.is_partial() ? 0 : item.num_queries - 1);
  if (args.window > 0 && item.is_partial()) {
    for (int64_t query = 1; query < item.num_queries; query++) {
      const int64_t position = position_of(args, item, query);
      if (position < first) first = position;
    }
  }
  return {args.window > 0 && first >= args.window ? first - args.window + 1 : 0, last + 1};
}

// Adds the keys of an item's chunk; of bytes, which are widened as soon as they are found, its values, too.
OCTAVO_INLINE void add_chunk(const AttentionArgs& args, const Item& item, int64_t index, Ahead& ahead) {
  const Visible visible = visible_of(args, item);
  const int32_t* block_table = args.block_tables + item.request * args.block_table_stride;
  const int64_t start = index * kChunkTokens, end = start + kChunkTokens < visible.end ? start + kChunkTokens : visible.end;
  for (int64_t position = start; position < end; position += kTileTokens) {
    if (position + kTileTokens <= visible.begin) continue;
    const int64_t block_id = block_table[position / args.cache.block_size], offset = position % args.cache.block_size;
    ahead.add(tile_at(args.cache, kKeys, block_id, offset, item.head));
    if (element_bytes(args.cache) == 1) ahead.add(tile_at(args.cache, kValues, block_id, offset, item.head));
  }
}

// What follows the keys of the item's chunk `index`: its values, and the chunk behind it, or the first one of the next item.
OCTAVO_INLINE Ahead ahead_of(const AttentionArgs& args, const Item& item, const Chunk& chunk, int64_t index,
                             const Item* next) {
  Ahead ahead(kTileTokens * vector_bytes(args.cache));
  if (!is_tiled(args.cache)) return ahead;
  if (element_bytes(args.cache) > 1) {
    for (int i = chunk.first_tile; i < chunk.end_tile; i++) ahead.add(chunk.tiles[i].value);
  }
  if (index + 1 < item.end_chunk) {
    add_chunk(args, item, index + 1, ahead);
  } else if (next != nullptr) {
    add_chunk(args, *next, next->first_chunk, ahead);
  }
  return ahead;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
