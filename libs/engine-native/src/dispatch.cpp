// Choose the kernels that fit the processor.
#include "kernels.h"

#include <cstring>

namespace halfmoon {

int list_kernels(const Kernels **out, int limit) {
  int n = 0;
  auto add = [&](bool can, const Kernels *table) {
    if (can && table && n < limit)
      out[n++] = table;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("f16c");
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  add(v4 && __builtin_cpu_supports("avx512bf16"), avx512_bf16::table());
  add(v4, avx512::table());
  add(v3, avx2::table());
#endif
  add(true, neon::table());
  add(true, generic::table());
  return n;
}

const Kernels *choose_kernels(const char *name) {
  const Kernels *all[8];
  int n = list_kernels(all, 8);
  for (int i = 0; i < n; ++i)
    if (!name || !*name || std::strcmp(all[i]->name, name) == 0)
      return all[i];
  return nullptr;
}

} // namespace halfmoon
