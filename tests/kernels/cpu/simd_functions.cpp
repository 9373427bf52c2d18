// The functions of simd.h as loops over arrays whose lengths are multiples of 16.

#include "simd.h"

using namespace octavo::OCTAVO_ISA;

extern "C" {

void apply_exp(const float* x, float* y, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, exp(load(x + i)));
}

void apply_tanh(const float* x, float* y, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, tanh(load(x + i)));
}

void apply_sigmoid(const float* x, float* y, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, sigmoid(load(x + i)));
}

void apply_round_to_bf16(const float* x, float* y, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, round_to<bf16>(load(x + i)));
}

// Per 16 numbers their sum, their maximum, and the first of them that are copied one by one: 16 results.
void apply_reductions(const float* x, float* y, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = static_cast<int>(i / kLanes % (kLanes - 1));
    store_first(y + i, load_first(x + i, count), count);
    y[i + kLanes - 2] = reduce_max(load(x + i));
    y[i + kLanes - 1] = reduce_add(load(x + i));
  }
}
}
