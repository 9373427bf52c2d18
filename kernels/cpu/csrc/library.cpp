// The C interface: which instruction sets there are, kernels by name, teams, and running a list of commands.

#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kernel.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

struct Entry {
  std::string isa;
  std::string name;
  Kernel kernel;
};

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

#if defined(__x86_64__)
// Tiles have to be asked for, once per process (Linux, arch/x86/include/uapi/asm/prctl.h).
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool is_supported(const char* isa) {
  const std::string name = isa;
  if (name == "portable") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (name == "avx2") return avx2;
  if (name == "avx512") return avx512;
  if (name == "avx512_bf16") return avx512_bf16;
  if (name == "amx") {
    const bool amx = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
    return avx512_bf16 && amx && may_use_tiles();
  }
#endif
  return false;
}

}  // namespace

Registration::Registration(const char* isa, const char* name, Kernel kernel) { entries().push_back({isa, name, kernel}); }

}  // namespace octavo

using octavo::Command;
using octavo::Kernel;
using octavo::Team;

#define OCTAVO_EXPORT __attribute__((visibility("default")))

extern "C" {

// 1 when this machine can run the kernels of `isa`, else 0.
OCTAVO_EXPORT int32_t octavo_is_supported(const char* isa) { return octavo::is_supported(isa) ? 1 : 0; }

// The kernel `name` for `isa`; NULL when there is none.
OCTAVO_EXPORT Kernel octavo_kernel(const char* isa, const char* name) {
  for (const octavo::Entry& entry : octavo::entries()) {
    if (entry.isa == isa && entry.name == name) return entry.kernel;
  }
  return nullptr;
}

// NULL when the threads cannot be started.
OCTAVO_EXPORT Team* octavo_team_create(int32_t num_threads) {
  try {
    return new Team(num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

OCTAVO_EXPORT void octavo_team_destroy(Team* team) { delete team; }

// Runs a list; the result is a Failure.
OCTAVO_EXPORT int32_t octavo_run(Team* team, const Command* commands, int64_t num_commands, int64_t num_rows) {
  return static_cast<int32_t>(team->run(commands, num_commands, num_rows));
}
}
