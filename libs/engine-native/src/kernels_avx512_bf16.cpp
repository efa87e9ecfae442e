// AVX-512 with products of pairs of bfloat16 numbers.
#include "isa.h"
#if defined(__x86_64__)
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define HALFMOON_ISA avx512_bf16
#define HALFMOON_LANES 16
#define HALFMOON_BF16_DOT 1
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
namespace halfmoon { namespace avx512_bf16 { const Kernels *table() { return nullptr; } } }
#endif
