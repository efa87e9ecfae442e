#include "buffers.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

namespace halfmoon {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Map whole pages from a multiple of a huge page on. The end that fills no huge page stays on small
// ones: memory does not grow.
void *map_huge(size_t n_bytes) {
  size_t size = round_up(n_bytes, kPage);
  void *mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED)
    return nullptr;
  char *begin = static_cast<char *>(mapped);
  size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before != 0)
    munmap(begin, before);
  if (before != kHugePage)
    munmap(begin + before + size, kHugePage - before);
  madvise(begin + before, size / kHugePage * kHugePage, MADV_HUGEPAGE);
  return begin + before;
}

struct ThreadScratch {
  void *data[static_cast<int>(ScratchSlot::count)] = {};
  size_t n_bytes[static_cast<int>(ScratchSlot::count)] = {};

  ~ThreadScratch() {
    for (int i = 0; i < static_cast<int>(ScratchSlot::count); ++i)
      free_buffer(data[i], n_bytes[i]);
  }
};

thread_local ThreadScratch own;

} // namespace

void *allocate_buffer(size_t n_bytes) {
  if (n_bytes > SIZE_MAX / 2)
    return nullptr;
  if (n_bytes >= kHugePage)
    return map_huge(n_bytes);
  return aligned_alloc(64, round_up(n_bytes + 1, 64));
}

void free_buffer(void *buffer, size_t n_bytes) {
  if (!buffer)
    return;
  if (n_bytes >= kHugePage)
    munmap(buffer, round_up(n_bytes, kPage));
  else
    free(buffer);
}

void *scratch(ScratchSlot slot, size_t n_bytes) {
  int i = static_cast<int>(slot);
  if (own.n_bytes[i] >= n_bytes && own.data[i])
    return own.data[i];
  free_buffer(own.data[i], own.n_bytes[i]);
  own.n_bytes[i] = round_up(n_bytes, kPage);
  own.data[i] = allocate_buffer(own.n_bytes[i]);
  if (!own.data[i]) {
    std::fprintf(stderr, "halfmoon-engine-native: no memory for %zu bytes of scratch\n", n_bytes);
    std::abort();
  }
  return own.data[i];
}

} // namespace halfmoon
