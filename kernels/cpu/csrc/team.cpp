#include "team.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// A wait in the operating system costs some 50 microseconds on a virtual machine; a step's serial parts take less.
constexpr int kSpins = 4000;
constexpr int64_t kAlignment = 64;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `value` is no longer `old`.
void wait_for_change(std::atomic<uint32_t>& value, uint32_t old, std::atomic<int32_t>& num_asleep) {
  for (int i = 0; i < kSpins; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  num_asleep.fetch_add(1);
  value.wait(old);
  num_asleep.fetch_sub(1);
}

// The count of sleepers is read after the change, and raised before the sleeper looks at the value once more.
void change(std::atomic<uint32_t>& value, std::atomic<int32_t>& num_asleep) {
  value.fetch_add(1);
  if (num_asleep.load() != 0) value.notify_all();
}

}  // namespace

int Work::num_threads() const { return team_.num_threads_; }

int64_t Work::take(int64_t num_items) { return team_.next_item_.fetch_add(num_items, std::memory_order_relaxed); }

void Work::barrier() { team_.barrier(); }

void Work::fail(Failure failure) {
  int32_t none = 0;
  team_.failure_.compare_exchange_strong(none, static_cast<int32_t>(failure));
}

void* Work::scratch(int64_t num_bytes) {
  Team::Scratch& own = team_.scratch_[thread];
  if (own.num_bytes < num_bytes) {
    std::free(own.memory);
    own.num_bytes = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    own.memory = std::aligned_alloc(kAlignment, own.num_bytes);
    if (own.memory == nullptr) {
      own.num_bytes = 0;
      fail(Failure::kOutOfMemory);
    }
  }
  return own.memory;
}

Team::Team(int num_threads) : num_threads_(num_threads), scratch_(num_threads) {
  for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
  is_ending_ = true;
  change(job_number_, num_asleep_);
  for (std::thread& thread : threads_) thread.join();
  for (Scratch& scratch : scratch_) std::free(scratch.memory);
}

Failure Team::run(const Command* commands, int64_t num_commands, int64_t num_rows) {
  job_ = {commands, num_commands, num_rows};
  failure_.store(0, std::memory_order_relaxed);
  change(job_number_, num_asleep_);
  run_as(0);
  return static_cast<Failure>(failure_.load());
}

void Team::serve(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_for_change(job_number_, seen, num_asleep_);
    seen++;  // a job ends with a barrier of all threads, so none is ever missed
    if (is_ending_) return;
    run_as(thread);
  }
}

void Team::run_as(int thread) {
  const Job job = job_;
  for (int64_t i = 0; i < job.num_commands; i++) {
    Work work(*this, job.num_rows, thread);
    job.commands[i].kernel(job.commands[i].args, work);
    barrier();
  }
}

void Team::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
    wait_for_change(phase_, phase, num_asleep_);
    return;
  }
  num_arrived_.store(0, std::memory_order_relaxed);
  next_item_.store(0, std::memory_order_relaxed);
  change(phase_, num_asleep_);
}

}  // namespace octavo
