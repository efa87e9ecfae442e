// Any processor: vectors of four floats, which every 64-bit one has.
#include "isa.h"
#define HALFMOON_ISA generic
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
