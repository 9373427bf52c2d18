// Ragged paged attention: queries of prefill and of decode in one command, over the block tables.
//
// The chunks of an item's keys begin at the request's start, and each gives weights relative to its own largest score;
// joining them in their order is the same arithmetic in an item as in a reduction of items. So a query has the same bits
// alone and in a batch, in one item and in several, and whatever queries share its item.

#include <utility>

#include "attention_amx.h"
#include "attention_items.h"
#include "attention_products.h"
#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class Engine>
struct Scratch {
  ChunkScratch<typename Engine::Element> chunk;
  typename Engine::Number* queries;  // [max_rows, dim]
  typename Engine::Number* weights;  // [16, kChunkTokens]
  float* products;                   // [2, 16, kChunkTokens]
  float* chunk_sums;                 // [16, dim]
  float* sums;                       // [max_rows, dim]
  RowStates* states;                 // [max_rows / 16]

  static int64_t num_bytes(const Geometry& geometry) {
    const int64_t dim = geometry.dim, rows = geometry.max_rows;
    return ChunkScratch<typename Engine::Element>::num_bytes(dim) + kRows * (kChunkTokens * 12 + dim * 4) +
           rows * dim * 8 + rows / kRows * static_cast<int64_t>(sizeof(RowStates));
  }

  Scratch(char* memory, const Geometry& geometry) {
    const int64_t dim = geometry.dim, rows = geometry.max_rows;
    const auto take = [&memory](int64_t num_bytes) { return std::exchange(memory, memory + num_bytes); };
    chunk.dim = dim;
    chunk.elements = reinterpret_cast<typename Engine::Element*>(
        take(kChunkTiles * 2 * kTileTokens * dim * sizeof(typename Engine::Element)));
    chunk.scales = reinterpret_cast<float*>(take(kChunkTiles * 2 * kTileTokens * 4));
    queries = reinterpret_cast<typename Engine::Number*>(take(rows * dim * 4));
    weights = reinterpret_cast<typename Engine::Number*>(take(kRows * kChunkTokens * 4));
    products = reinterpret_cast<float*>(take(2 * kRows * kChunkTokens * 4));
    chunk_sums = reinterpret_cast<float*>(take(kRows * dim * 4));
    sums = reinterpret_cast<float*>(take(rows * dim * 4));
    states = reinterpret_cast<RowStates*>(take(0));
  }
};

template <class Engine, class T>
void load_queries(const AttentionArgs& args, const Geometry& geometry, const Item& item, const Scratch<Engine>& scratch) {
  const int64_t head_dim = args.cache.head_dim;
  typename Engine::Number* to = scratch.queries;
  for (int64_t query = 0; query < item.num_queries; query++) {
    const T* from = static_cast<const T*>(args.query) + token_of(args, item, query) * args.query_stride +
                    item.head * geometry.group * head_dim;
    for (int64_t head = 0; head < geometry.group; head++, from += head_dim) {
      for (int64_t i = 0; i < geometry.dim; i += kLanes, to += kLanes) {
        const int64_t left = head_dim - i;
        store(to, left >= kLanes ? load(from + i) : load_first(from + i, static_cast<int>(left)));
      }
    }
  }
}

ScoreRule score_rule(const AttentionArgs& args) {
  const float key_scale = args.kv_scales == nullptr ? 1.0f : args.kv_scales[kKeys];
  const float scale = args.scale * key_scale;
  return {scale * kLog2E, args.soft_cap * kLog2E};
}

// Up to 16 rows of an item, and the tiles of a chunk through which any of them sees.
struct Rows {
  int64_t first;
  int count;
  int end_tile;  // the first one behind what they see
};

Rows rows_at(const AttentionArgs& args, const Geometry& geometry, const Item& item, const Chunk& chunk, int64_t start, int64_t first) {
  const int64_t left = item.num_queries * geometry.group - first;
  const int count = static_cast<int>(left < kRows ? left : kRows);
  const int64_t num_keys = position_of(args, item, (first + count - 1) / geometry.group) + 1 - start;
  const int64_t num_tiles = num_keys > 0 ? (num_keys + kTileTokens - 1) / kTileTokens : 0;
  return {first, count, static_cast<int>(num_tiles < chunk.end_tile ? num_tiles : chunk.end_tile)};
}

// Turns the products of rows with the chunk at `start` into its result for them: `states` and sums of values.
template <class Engine>
void weigh_chunk(const AttentionArgs& args, const Geometry& geometry, const Item& item, const Chunk& chunk, int64_t start,
                 const Rows& rows, float* products, const ScoreRule& rule, const Scratch<Engine>& scratch,
                 RowStates& states, Ahead& ahead) {
  states.clear();
  RowKeys keys[kRows];
  for (int i = 0; i < rows.count; i++) {
    const int64_t end = position_of(args, item, (rows.first + i) / geometry.group) + 1 - start;
    const int64_t begin = args.window > 0 ? end - args.window : 0;
    keys[i] = {static_cast<int>(begin < 0 ? 0 : begin < kChunkTokens ? begin : kChunkTokens),
               static_cast<int>(end < 0 ? 0 : end < kChunkTokens ? end : kChunkTokens)};
  }
  weigh_rows(products, scratch.weights, chunk, rows.end_tile, keys, rows.count, rule, states);
  Engine::weigh(scratch.weights, rows.count, chunk, rows.end_tile, geometry.dim, scratch.chunk_sums, ahead);
}

template <class T>
void store_result(const AttentionArgs& args, const Geometry& geometry, int64_t token, int64_t head, const float* sums,
                  float total) {
  const float value_scale = args.kv_scales == nullptr ? 1.0f : args.kv_scales[kValues];
  const F32 factor = splat(value_scale / total);
  T* to = static_cast<T*>(args.out) + (token * args.num_query_heads + head) * args.cache.head_dim;
  for (int64_t i = 0; i < geometry.dim; i += kLanes) {
    const int64_t left = args.cache.head_dim - i;
    if (left >= kLanes) {
      store(to + i, load(sums + i) * factor);
    } else {
      store_first(to + i, load(sums + i) * factor, static_cast<int>(left));
    }
  }
}

// Puts one chunk's results where the reductions find them.
void store_partials(const AttentionArgs& args, const Geometry& geometry, const Item& item, int64_t chunk,
                    const Rows& rows, const RowStates& states, const float* chunk_sums) {
  for (int i = 0; i < rows.count; i++) {
    const int64_t row = rows.first + i, partial = item.reduction(row / geometry.group)[2] + chunk;
    float* to = partial_at(args, geometry, partial, item.head * geometry.group + row % geometry.group);
    std::memcpy(to, chunk_sums + i * geometry.dim, geometry.dim * sizeof(float));
    to[geometry.dim] = states.largest[i];
    to[geometry.dim + 1] = states.total[i];
  }
}

// Attends from all rows of the item to one chunk, and joins or puts by what it gives.
template <class Engine>
void attend_chunk(const AttentionArgs& args, const Geometry& geometry, const Item& item, const Chunk& chunk, int64_t index,
                  const ScoreRule& rule, const Scratch<Engine>& scratch, Ahead& ahead) {
  const int64_t start = index * kChunkTokens, num_rows = item.num_queries * geometry.group;
  const auto score = [&](const Rows& rows, float* products) {
    const auto* queries = scratch.queries + rows.first * geometry.dim;
    if (rows.end_tile > chunk.first_tile) {
      Engine::score(queries, rows.count, chunk, rows.end_tile, geometry.dim, products, ahead);
    }
  };
  Rows rows = rows_at(args, geometry, item, chunk, start, 0);
  score(rows, scratch.products);
  for (int turn = 0; rows.first < num_rows; turn ^= 1) {
    Rows next = rows;
    next.first += kRows;
    if (next.first < num_rows) {
      next = rows_at(args, geometry, item, chunk, start, next.first);
      score(next, scratch.products + (turn ^ 1) * kRows * kChunkTokens);  // while this turn's weights are computed
    }
    RowStates states;
    if (rows.end_tile > chunk.first_tile) {
      float* products = scratch.products + turn * kRows * kChunkTokens;
      weigh_chunk(args, geometry, item, chunk, start, rows, products, rule, scratch, states, ahead);
    } else {
      states.clear();
    }
    if (item.is_partial()) {
      store_partials(args, geometry, item, index, rows, states, scratch.chunk_sums);
    } else {
      join_chunk(scratch.states[rows.first / kRows], scratch.sums + rows.first * geometry.dim, states, scratch.chunk_sums,
                 geometry.dim, rows.count, geometry.dim);
    }
    rows = next;
  }
}

template <class Engine, class T>
void run_item(const AttentionArgs& args, const Geometry& geometry, const Item& item, const Item* next,
              const Scratch<Engine>& scratch) {
  const int64_t num_rows = item.num_queries * geometry.group;
  const ScoreRule rule = score_rule(args);
  const Visible visible = visible_of(args, item);
  const int32_t* block_table = args.block_tables + item.request * args.block_table_stride;
  load_queries<Engine, T>(args, geometry, item, scratch);
  std::memset(scratch.sums, 0, num_rows * geometry.dim * sizeof(float));
  for (int64_t row = 0; row < num_rows; row += kRows) scratch.states[row / kRows].clear();
  for (int64_t index = item.first_chunk; index < item.end_chunk; index++) {
    Chunk chunk;
    find_chunk(args.cache, scratch.chunk, block_table, index * kChunkTokens, visible.begin, visible.end, item.head, chunk);
    Ahead ahead = ahead_of(args, item, chunk, index, next);
    attend_chunk(args, geometry, item, chunk, index, rule, scratch, ahead);
    ahead.ask_for_rest();
  }
  if (item.is_partial()) return;
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t token = item.first_token + row / geometry.group;
    const int64_t head = item.head * geometry.group + row % geometry.group;
    const float total = scratch.states[row / kRows].total[row % kRows];
    store_result<T>(args, geometry, token, head, scratch.sums + row * geometry.dim, total);
  }
}

// Joins the partial results of one query and KV head.
template <class Engine, class T>
void reduce(const AttentionArgs& args, const Geometry& geometry, const int32_t* reduction, int64_t kv_head,
            Scratch<Engine>& scratch) {
  const int64_t num_chunks = (args.seq_lens[reduction[0]] + kChunkTokens - 1) / kChunkTokens;
  const int64_t token = args.query_start_loc[reduction[0]] + reduction[1];
  for (int64_t row = 0; row < geometry.group; row += kRows) {
    const int rows = static_cast<int>(geometry.group - row < kRows ? geometry.group - row : kRows);
    const int64_t head = kv_head * geometry.group + row;
    RowStates total;
    total.clear();
    std::memset(scratch.sums, 0, rows * geometry.dim * sizeof(float));
    for (int64_t index = 0; index < num_chunks; index++) {
      const float* from = partial_at(args, geometry, reduction[2] + index, head);
      RowStates states;
      states.clear();
      for (int i = 0; i < rows; i++) {
        states.largest[i] = from[i * geometry.partial_stride + geometry.dim];
        states.total[i] = from[i * geometry.partial_stride + geometry.dim + 1];
      }
      join_chunk(total, scratch.sums, states, from, geometry.partial_stride, rows, geometry.dim);
    }
    for (int i = 0; i < rows; i++) {
      store_result<T>(args, geometry, token, head + i, scratch.sums + i * geometry.dim, total.total[i]);
    }
  }
}

template <class Engine, class T>
void attend(const AttentionArgs& args, Work& work) {
  const Geometry geometry(args);
  auto* memory = static_cast<char*>(work.scratch(Scratch<Engine>::num_bytes(geometry)));
  if (memory == nullptr) return;
  Scratch<Engine> scratch(memory, geometry);
  int64_t rows_at_once = 0;
  Item item, next;
  bool has_item = read_item(args, geometry, work.take(), item);
  while (has_item) {
    const bool has_next = read_item(args, geometry, work.take(), next);
    const int64_t rows = item.num_queries * geometry.group < kRows ? item.num_queries * geometry.group : kRows;
    if (rows != rows_at_once) Engine::begin(static_cast<int>(rows_at_once = rows));
    run_item<Engine, T>(args, geometry, item, has_next ? &next : nullptr, scratch);
    item = next;
    has_item = has_next;
  }
  Engine::end();
}

template <class Engine, class T>
void join_splits(const AttentionArgs& args, Work& work) {
  if (args.num_reductions == 0 || args.reductions[0] < 0) return;
  const Geometry geometry(args);
  auto* memory = static_cast<char*>(work.scratch(Scratch<Engine>::num_bytes(geometry)));
  if (memory == nullptr) return;
  Scratch<Engine> scratch(memory, geometry);
  const int64_t num_heads = args.cache.num_kv_heads;
  for (int64_t i = work.take(); i < args.num_reductions * num_heads; i = work.take()) {
    const int32_t* reduction = args.reductions + i / num_heads * 4;
    if (reduction[0] < 0) break;
    reduce<Engine, T>(args, geometry, reduction, i % num_heads, scratch);
  }
}

#if defined(OCTAVO_AMX)
using BfloatEngine = AmxEngine;
#elif defined(OCTAVO_AVX512_BF16)
using BfloatEngine = VectorEngine<BfloatPairs>;
#else
using BfloatEngine = VectorEngine<WidenedPairs>;
#endif

OCTAVO_KERNEL(paged_attention, AttentionArgs) {
  if (args.is_bf16) {
    attend<BfloatEngine, bf16>(args, work);
  } else if (args.cache.kind == kKvFloat32) {
    attend<VectorEngine<FloatWords>, float>(args, work);
  } else {
    attend<VectorEngine<WidenedPairs>, float>(args, work);
  }
}

OCTAVO_PHASE(paged_attention, 2, AttentionArgs) {
  if (args.is_bf16) {
    join_splits<BfloatEngine, bf16>(args, work);
  } else if (args.cache.kind == kKvFloat32) {
    join_splits<VectorEngine<FloatWords>, float>(args, work);
  } else {
    join_splits<VectorEngine<WidenedPairs>, float>(args, work);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
