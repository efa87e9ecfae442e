// x86-64-v3: AVX2, FMA and F16C.
#include "isa.h"
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define HALFMOON_ISA avx2
#define HALFMOON_LANES 8
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
namespace halfmoon { namespace avx2 { const Kernels *table() { return nullptr; } } }
#endif
