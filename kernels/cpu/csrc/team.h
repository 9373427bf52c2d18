// A team of threads that runs command lists, and what a kernel sees of it.
//
// Every thread of the team runs every kernel; a kernel shares its work out by taking items from a common counter, so
// that a thread which the operating system has interrupted holds up no more than the item in its hands. Which thread
// computes an item must not change the item's result. The caller is thread 0. A barrier stands behind every command.
// Waiting threads spin for a few microseconds and then sleep in the kernel, so that an idle team uses no CPU and the
// other processes of the machine get theirs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// What a failed command says; the first failure of a list is the one that is reported.
enum class Failure : int32_t { kNone = 0, kIndexOutOfRange = 1, kOutOfMemory = 2 };

class Team;

// The part of one thread in one command.
class Work {
 public:
  Work(Team& team, int64_t num_rows, int thread) : num_rows(num_rows), thread(thread), team_(team) {}

  // Rows that this run computes: what a recorded list is told when it is replayed.
  const int64_t num_rows;
  const int thread;

  int num_threads() const;

  // The next item of the present phase; items from 0 on are each taken once. Stop when it is past the last one.
  int64_t take(int64_t num_items = 1);

  // Ends a phase: returns when all threads have come here, and starts counting items from 0 again.
  void barrier();

  // 64-byte aligned memory of this thread, which lasts until its next call of scratch; nullptr after a failure.
  void* scratch(int64_t num_bytes);

  // Makes the run return `failure`. The kernel goes on and must come to an end without touching what is not there.
  void fail(Failure failure);

 private:
  Team& team_;
};

using Kernel = void (*)(const void* args, Work& work);

struct Command {
  Kernel kernel;
  const void* args;
};

class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs the commands one after the other on all threads. Calls must not overlap.
  Failure run(const Command* commands, int64_t num_commands, int64_t num_rows);

 private:
  friend class Work;
  struct Job {
    const Command* commands;
    int64_t num_commands;
    int64_t num_rows;
  };
  struct Scratch {
    void* memory = nullptr;
    int64_t num_bytes = 0;
  };

  void serve(int thread);
  void run_as(int thread);
  void barrier();

  const int num_threads_;
  Job job_{};
  bool is_ending_ = false;
  std::vector<Scratch> scratch_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<int64_t> next_item_{0};
  alignas(64) std::atomic<int32_t> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int32_t> num_asleep_{0};
  std::atomic<int32_t> failure_{0};
};

}  // namespace octavo
