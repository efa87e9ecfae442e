// AArch64: NEON, which every such processor has; conversions of float16 are part of it.
#include "isa.h"
#if defined(__aarch64__)
#define HALFMOON_ISA neon
#define HALFMOON_LANES 4
#include "simd.inl"
#include "elementwise.inl"
#include "rotary.inl"
#include "attention.inl"
#include "linear_pack.inl"
#include "linear_kernel.inl"
#include "linear_finish.inl"
#include "linear.inl"
#include "linear_unpacked.inl"
#include "sampling.inl"
#include "table.inl"
#else
namespace halfmoon { namespace neon { const Kernels *table() { return nullptr; } } }
#endif
