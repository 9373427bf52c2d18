// Random numbers that are a pure function of their coordinates (Philox-4x32-10, Salmon et al., SC'11).

#include "kernel.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct PhiloxUniformArgs {
  const int64_t* seeds;           // [rows], the key
  const int64_t* choice_indices;  // [rows], the words of the counter, as the next two
  const int64_t* positions;
  const int64_t* draws;
  double* uniforms;  // [rows], in [0, 1)
};

constexpr int kNumRounds = 10;

double uniform(uint64_t seed, uint32_t word_0, uint32_t word_1, uint32_t word_2) {
  uint32_t key_0 = static_cast<uint32_t>(seed), key_1 = static_cast<uint32_t>(seed >> 32), word_3 = 0;
  for (int round = 0; round < kNumRounds; round++) {
    const uint64_t first = uint64_t{0xD2511F53} * word_0, second = uint64_t{0xCD9E8D57} * word_2;
    word_0 = static_cast<uint32_t>(second >> 32) ^ word_1 ^ key_0;
    word_1 = static_cast<uint32_t>(second);
    word_2 = static_cast<uint32_t>(first >> 32) ^ word_3 ^ key_1;
    word_3 = static_cast<uint32_t>(first);
    key_0 += 0x9E3779B9;  // golden ratio and sqrt(3) - 1, in 32 bits
    key_1 += 0xBB67AE85;
  }
  return static_cast<double>(uint64_t{word_0} << 21 | word_1 >> 11) * 0x1p-53;
}

constexpr int64_t kRowsAtOnce = 64;

OCTAVO_KERNEL(philox_uniform, PhiloxUniformArgs) {
  for (int64_t first = work.take(kRowsAtOnce); first < work.num_rows; first = work.take(kRowsAtOnce)) {
    const int64_t end = first + kRowsAtOnce < work.num_rows ? first + kRowsAtOnce : work.num_rows;
    for (int64_t row = first; row < end; row++) {
      const auto word = [row](const int64_t* words) { return static_cast<uint32_t>(words[row]); };
      const auto seed = static_cast<uint64_t>(args.seeds[row]);
      args.uniforms[row] = uniform(seed, word(args.choice_indices), word(args.positions), word(args.draws));
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
