#include "team.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// To be woken takes some 50 microseconds on a virtual machine; what a step does between kernels takes less.
constexpr int kSpins = 1500;
constexpr int64_t kAlignment = 64;

// A state: number · 2^24 + closed · 2^23 + threads.
constexpr uint64_t kClosed = 1u << 23, kNumThreads = kClosed - 1;
constexpr int kNumberShift = 24;

constexpr uint64_t number_of(uint64_t state) { return state >> kNumberShift; }
constexpr uint64_t open_state(uint64_t number) { return number << kNumberShift; }
constexpr uint64_t closed_state(uint64_t number) { return open_state(number) | kClosed; }

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int Work::num_threads() const { return team_.num_threads_; }

int64_t Work::take(int64_t num_items) { return team_.next_item_.fetch_add(num_items, std::memory_order_relaxed); }

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

Team::Team(int num_threads) : num_threads_(num_threads), scratch_(num_threads), state_(closed_state(0)) {
  for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
  is_ending_ = true;
  announce(closed_state(number_of(state_.load()) + 1));
  for (std::thread& thread : threads_) thread.join();
  for (Scratch& scratch : scratch_) std::free(scratch.memory);
}

Failure Team::run(const Command* commands, int64_t num_commands, int64_t num_rows) {
  if (num_commands == 0) return Failure::kNone;
  // No command is open, so nobody looks at the job.
  const uint64_t first = number_of(state_.load(std::memory_order_acquire)) + 1, end = first + num_commands;
  job_ = {commands, num_commands, num_rows, first};
  failure_.store(0, std::memory_order_relaxed);
  next_item_.store(0, std::memory_order_relaxed);
  announce(open_state(first));
  for (uint64_t state = open_state(first); number_of(state) < end; state = state_.load(std::memory_order_acquire)) {
    uint64_t number = 0;
    if (join(number)) {
      work_on(number, 0);
    } else {
      wait_for_change(state);
    }
  }
  return static_cast<Failure>(failure_.load());
}

void Team::serve(int thread) {
  while (!is_ending_) {
    const uint64_t state = state_.load(std::memory_order_acquire);
    uint64_t number = 0;
    if (join(number)) {
      work_on(number, thread);
    } else {
      wait_for_change(state);
    }
  }
}

// Counts this thread as one of the present command, unless that may not be joined any more.
bool Team::join(uint64_t& number) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while ((state & kClosed) == 0) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      number = number_of(state);
      return true;
    }
  }
  return false;
}

void Team::work_on(uint64_t number, int thread) {
  const Command& command = job_.commands[number - job_.first_number];
  Work work(*this, job_.num_rows, thread);
  command.kernel(command.args, work);
  leave(number);
}

// The thread found no item left. The last one to leave begins the next command.
void Team::leave(uint64_t number) {
  uint64_t state = state_.load(std::memory_order_relaxed), left;
  do {
    left = (state | kClosed) - 1;
  } while (!state_.compare_exchange_weak(state, left, std::memory_order_acq_rel, std::memory_order_relaxed));
  if ((left & kNumThreads) != 0) return;
  const bool is_last = number + 1 == job_.first_number + job_.num_commands;
  next_item_.store(0, std::memory_order_relaxed);
  announce(is_last ? closed_state(number + 1) : open_state(number + 1));
}

// Returns when another command is the present one; at once when that is so already.
void Team::wait_for_change(uint64_t state) {
  const uint64_t number = number_of(state);
  const auto is_same = [&] {
    const uint64_t present = state_.load();
    return number_of(present) == number && ((present & kClosed) != 0) && !is_ending_;
  };
  for (int i = 0; i < kSpins; i++) {
    if (!is_same()) return;
    pause_briefly();
  }
  num_asleep_.fetch_add(1);
  const uint32_t num_changes = num_changes_.load();
  if (is_same()) num_changes_.wait(num_changes);
  num_asleep_.fetch_sub(1);
}

// Who sleeps has raised its count before it looked at the state for the last time.
void Team::announce(uint64_t state) {
  state_.store(state);
  if (num_asleep_.load() == 0) return;
  num_changes_.fetch_add(1);
  num_changes_.notify_all();
}

}  // namespace octavo
