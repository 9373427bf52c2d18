// A team of threads that runs command lists, and what a kernel sees of it.
//
// A kernel shares its work out by taking items from a common counter. Threads join a command as they come, and a command
// is over when no item is left and every thread that joined has left: so a thread which the operating system has put
// aside, because another process wants its core, holds up no more than the item in its hands, and commands that end
// meanwhile end without it. Which thread computes an item must not change the item's result. The caller is thread 0.
// Waiting threads spin for a short while and then sleep in the kernel, so that an idle team uses no CPU and the other
// processes of the machine get theirs. Rejected: barriers, at which a team is as slow as its unluckiest thread; on two
// cores of which one was busy, a step took ten times as long as with one thread.
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

  // The next item; items from 0 on are each taken once. A kernel returns when it has got one past the last.
  int64_t take(int64_t num_items = 1);

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

  // Runs the commands one after the other. Calls must not overlap.
  Failure run(const Command* commands, int64_t num_commands, int64_t num_rows);

 private:
  friend class Work;
  struct Job {
    const Command* commands;
    int64_t num_commands;
    int64_t num_rows;
    uint64_t first_number;  // of the first command
  };
  struct Scratch {
    void* memory = nullptr;
    int64_t num_bytes = 0;
  };

  void serve(int thread);
  bool join(uint64_t& number);
  void work_on(uint64_t number, int thread);
  void leave(uint64_t number);
  void wait_for_change(uint64_t state);
  void announce(uint64_t state);

  const int num_threads_;
  Job job_{};
  std::vector<Scratch> scratch_;
  std::vector<std::thread> threads_;
  // The number of the present command, whether it may be joined, and how many threads are in it.
  alignas(64) std::atomic<uint64_t> state_;
  alignas(64) std::atomic<int64_t> next_item_{0};
  alignas(64) std::atomic<uint32_t> num_changes_{0};
  std::atomic<int32_t> num_asleep_{0};
  std::atomic<int32_t> failure_{0};
  std::atomic<bool> is_ending_{false};
};

}  // namespace octavo
