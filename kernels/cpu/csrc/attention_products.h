// Products of up to 16 rows with the tiles of a chunk, by instruction set: queries times keys, weights times values.
//
// An engine has a type of the numbers of rows, a type of the elements of tiles, and two products, which ask for what is
// multiplied next. Both are sums over a row's numbers in their order, each in one accumulator, so that a row has the same
// bits however many rows and tiles there are. Tiles through which a row sees nothing add zeros.
#pragma once

#include "attention_softmax.h"

namespace octavo {
namespace OCTAVO_ISA {

// Sums in one register: what lies in several is slow, because the compiler keeps it in memory.
#if defined(OCTAVO_AVX512)
typedef F32 Sums;
typedef U32 SumWords;
constexpr int kHeldRows = 6, kHeldVectors = 4;  // of sums at a time
#elif defined(OCTAVO_AVX2)
typedef F32x8 Sums;
typedef uint32_t SumWords __attribute__((vector_size(32)));
constexpr int kHeldRows = 4, kHeldVectors = 2;
#else
typedef F32x4 Sums;
typedef uint32_t SumWords __attribute__((vector_size(16)));
constexpr int kHeldRows = 4, kHeldVectors = 2;
#endif
constexpr int kSumLanes = sizeof(Sums) / sizeof(float);

// sums + number · words
OCTAVO_INLINE Sums add_product(Sums sums, float number, Sums words) {
#if defined(OCTAVO_AVX512)
  return fma(splat(number), words, sums);
#elif defined(OCTAVO_AVX2)
  return (Sums)_mm256_fmadd_ps(_mm256_set1_ps(number), (__m256)words, (__m256)sums);
#else
  return sums + number * words;
#endif
}

// A word of a tile is an fp32 number.
struct FloatWords {
  using Number = float;
  using Element = float;
  static constexpr int kNumbers = 1;  // of a row, to a word
  OCTAVO_INLINE Sums add(Sums sums, const float* row, const char* from) {
    Sums words;
    std::memcpy(&words, from, sizeof words);
    return add_product(sums, row[0], words);
  }
};

// A word is a pair of bfloat16 numbers, and rows are fp32.
struct WidenedPairs {
  using Number = float;
  using Element = bf16;
  static constexpr int kNumbers = 2;
  OCTAVO_INLINE Sums add(Sums sums, const float* row, const char* from) {
    SumWords pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    sums = add_product(sums, row[0], (Sums)(pairs << 16));
    return add_product(sums, row[1], (Sums)(pairs & 0xffff0000));
  }
};

#if defined(OCTAVO_AVX512_BF16)
// A word is a pair of bfloat16 numbers, and rows are bfloat16, too.
struct BfloatPairs {
  using Number = bf16;
  using Element = bf16;
  static constexpr int kNumbers = 2;
  OCTAVO_INLINE Sums add(Sums sums, const bf16* row, const char* from) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof pair);
    const __m512i pairs = _mm512_loadu_si512(from);
    return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
  }
};
#endif

template <class Words>
struct VectorEngine {
  using Number = typename Words::Number;
  using Element = typename Words::Element;

  static void begin(int) {}
  static void end() {}

  // products[16, kChunkTokens] of queries [16, dim] with the keys of tiles.
  static void score(const Number* queries, int num_rows, const Chunk& chunk, int end_tile, int64_t dim,
                    float* products, Ahead& ahead) {
    const int steps = static_cast<int>(dim) / Words::kNumbers;
    for (int row = 0; row < num_rows; row += kHeldRows) {
      const int rows = num_rows - row < kHeldRows ? num_rows - row : kHeldRows;
      constexpr int kToTile = kTileTokens / kSumLanes;
      for (int i = chunk.first_tile * kToTile; i < end_tile * kToTile;) {
        const int vectors = end_tile * kToTile - i >= kHeldVectors ? kHeldVectors : 1;
        ahead.ask(vectors * steps * static_cast<int64_t>(sizeof(Sums)));
        const char* keys[kHeldVectors];
        for (int n = 0; n < vectors; n++) {
          keys[n] = chunk.tiles[(i + n) / kToTile].key + (i + n) % kToTile * sizeof(Sums);
        }
        float* to = products + row * kChunkTokens + i * kSumLanes;
        with_shape(rows, vectors, [&](auto held_rows, auto held_vectors) {
          Sums sums[held_rows()][held_vectors()] = {};
          add_products<held_rows(), held_vectors()>(sums, queries + row * dim, dim, keys, 64, steps);
          for (int r = 0; r < held_rows(); r++) {
            for (int n = 0; n < held_vectors(); n++) put(to + r * kChunkTokens + n * kSumLanes, sums[r][n]);
          }
        });
        i += vectors;
      }
    }
  }

  // sums[16, dim] of weights [16, kChunkTokens] with the values of tiles.
  static void weigh(const Number* weights, int num_rows, const Chunk& chunk, int end_tile, int64_t dim, float* to,
                    Ahead& ahead) {
    const int num_vectors = static_cast<int>(dim / kSumLanes);
    for (int row = 0; row < num_rows; row += kHeldRows) {
      const int rows = num_rows - row < kHeldRows ? num_rows - row : kHeldRows;
      for (int first = 0; first < num_vectors;) {
        const int vectors = num_vectors - first >= kHeldVectors ? kHeldVectors : 1;
        with_shape(rows, vectors, [&](auto held_rows, auto held_vectors) {
          Sums sums[held_rows()][held_vectors()] = {};
          for (int i = chunk.first_tile; i < end_tile; i++) {
            ahead.ask(held_vectors() * kTileTokens / Words::kNumbers * static_cast<int64_t>(sizeof(Sums)));
            const char* values[held_vectors()];
            for (int n = 0; n < held_vectors(); n++) values[n] = chunk.tiles[i].value + (first + n) * sizeof(Sums);
            const Number* from = weights + row * kChunkTokens + i * kTileTokens;
            add_products<held_rows(), held_vectors()>(sums, from, kChunkTokens, values, dim * 4,
                                                      kTileTokens / Words::kNumbers);
          }
          for (int r = 0; r < held_rows(); r++) {
            for (int n = 0; n < held_vectors(); n++) put(to + (row + r) * dim + (first + n) * kSumLanes, sums[r][n]);
          }
        });
        first += vectors;
      }
    }
  }

 private:
  OCTAVO_INLINE void put(float* to, Sums sums) { std::memcpy(to, &sums, sizeof sums); }

  // sums[r][n] += row r times the words at columns[n], `steps` of them, each `column_stride` bytes behind the last.
  template <int kNumRows, int kNumVectors>
  OCTAVO_INLINE void add_products(Sums (&sums)[kNumRows][kNumVectors], const Number* rows, int64_t row_stride,
                                  const char* const* columns, int64_t column_stride, int steps) {
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 8
      for (int r = 0; r < kNumRows; r++) {
#pragma GCC unroll 8
        for (int n = 0; n < kNumVectors; n++) {
          const Number* row = rows + r * row_stride + step * Words::kNumbers;
          sums[r][n] = Words::add(sums[r][n], row, columns[n] + step * column_stride);
        }
      }
    }
  }

  template <int kValue>
  struct Constant {
    constexpr int operator()() const { return kValue; }
  };

  // Calls `run` with the numbers of rows (1 to kHeldRows) and vectors (1 or kHeldVectors) as constants.
  template <class Run, int kNumRows = kHeldRows>
  OCTAVO_INLINE void with_shape(int rows, int vectors, const Run& run) {
    if constexpr (kNumRows > 1) {
      if (rows < kNumRows) return with_shape<Run, kNumRows - 1>(rows, vectors, run);
    }
    if (vectors == kHeldVectors) {
      run(Constant<kNumRows>{}, Constant<kHeldVectors>{});
    } else {
      run(Constant<kNumRows>{}, Constant<1>{});
    }
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
