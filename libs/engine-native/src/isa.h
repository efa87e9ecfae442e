// Compile one kernel source for several instruction sets.
//
// kernels_<set>.cpp defines HALFMOON_ISA (its namespace), HALFMOON_LANES (floats of a vector) and
// perhaps HALFMOON_BF16_DOT, includes the system headers, sets the compiler's target, and then
// includes the .inl files. Those use no templates or inline functions of the standard library:
// the linker could keep a copy that other processors can't run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"
#include "sampling.h"
