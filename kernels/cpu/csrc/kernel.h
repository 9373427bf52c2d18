// What every file of kernels includes: the registration of a kernel under its name, once per instruction set.
//
// A file of kernels is compiled once for each instruction set, with OCTAVO_ISA as the name of the namespace around its
// code, and with one of OCTAVO_AMX, OCTAVO_AVX512_BF16, OCTAVO_AVX512, OCTAVO_AVX2, OCTAVO_PORTABLE defined as well as
// all those below it (AMX implies AVX512_BF16 implies AVX512 implies AVX2). The result of a row must not depend on the
// other rows, on their number or on the threads; between instruction sets it may differ.
#pragma once

#include "team.h"

namespace octavo {

struct Registration {
  Registration(const char* isa, const char* name, Kernel kernel);
};

}  // namespace octavo

#define OCTAVO_STRING_OF(text) #text
#define OCTAVO_STRING(macro) OCTAVO_STRING_OF(macro)

// What has to wait for all of a kernel's items is a phase behind it: OCTAVO_PHASE(sample_tokens, 2, Args) follows
// OCTAVO_KERNEL(sample_tokens, Args), with the same arguments.
//
// OCTAVO_KERNEL(rms_norm, RmsNormArgs) { args.x ...; work.num_rows ...; }
#define OCTAVO_KERNEL(name, Args) OCTAVO_REGISTERED_KERNEL(name, #name, Args)
#define OCTAVO_PHASE(name, number, Args) OCTAVO_REGISTERED_KERNEL(name##_##number, #name "." #number, Args)
#define OCTAVO_REGISTERED_KERNEL(symbol, name, Args)                                                  \
  static void symbol##_of_args(const Args& args, Work& work);                                         \
  static void symbol##_kernel(const void* args, Work& work) {                                         \
    symbol##_of_args(*static_cast<const Args*>(args), work);                                          \
  }                                                                                                   \
  static const Registration symbol##_registration(OCTAVO_STRING(OCTAVO_ISA), name, symbol##_kernel);  \
  static void symbol##_of_args(const Args& args, Work& work)
