// Memory that kernels compute in.
#pragma once

#include <cstddef>

namespace halfmoon {

// Allocate `n_bytes` at a multiple of 64 bytes, on huge pages where it is large: a pass over weights
// on small pages misses the translation cache every 4 KiB. nullptr: no memory.
void *allocate_buffer(size_t n_bytes);
void free_buffer(void *buffer, size_t n_bytes);

// Scratch of the calling thread, kept for its next call. Each slot is a buffer of its own.
enum class ScratchSlot { rows, call_rows, sums, panel, sampling, changes, count };

// Return at least `n_bytes` at a multiple of 64 bytes; contents are undefined. Ends the process where
// there is no memory, as its kernels can't report it.
void *scratch(ScratchSlot slot, size_t n_bytes);

} // namespace halfmoon
