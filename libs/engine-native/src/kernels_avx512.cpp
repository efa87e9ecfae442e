// x86-64-v4: AVX-512 F, BW, VL and DQ.
#include "isa.h"
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define HALFMOON_ISA avx512
#define HALFMOON_LANES 16
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
namespace halfmoon { namespace avx512 { const Kernels *table() { return nullptr; } } }
#endif
