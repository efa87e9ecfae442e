// Compare every instruction set's attention with sums in double: for processors that this machine
// only emulates. Returns 1 where one differs.
//
//   aarch64-linux-gnu-g++ -std=gnu++17 -O3 -fno-math-errno -Wno-psabi -static -pthread \
//     -I libs/engine-native/src tests/engine/native/portable_kernels.cpp \
//     libs/engine-native/src/{parallel,buffers,dispatch,kernels_*}.cpp -o /tmp/kernels
//   qemu-aarch64 /tmp/kernels
#include "kernels.h"
#include "parallel.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

using namespace halfmoon;

namespace {

struct Case {
  DType dtype;
  int head_dim, n_kv_heads, n_shared, block_size;
  int64_t before, n_tokens, window;
  float softcap;
};

double compare(const Kernels &kernels, const Case &c) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto numbers = [&](int64_t n) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float &x : v)
      x = normal(random);
    return v;
  };
  int64_t end = c.before + c.n_tokens, width = c.n_kv_heads * c.head_dim;
  int64_t n_pages = (end + c.block_size - 1) / c.block_size, n_heads = c.n_kv_heads * c.n_shared;
  std::vector<char> memory(static_cast<size_t>(n_pages * 2 * c.block_size * width) *
                           size_of(c.dtype), '\xff');
  PoolView pool{memory.data(), c.dtype, n_pages, 1, c.block_size, c.n_kv_heads, c.head_dim};
  std::vector<int32_t> pages;
  for (int64_t i = 0; i < n_pages; ++i)
    pages.push_back(static_cast<int32_t>(n_pages - 1 - i));
  RunView all{0, end, 0, pages.data()}, run{0, c.n_tokens, c.before, pages.data()};
  std::vector<float> keys = numbers(end * width), values = numbers(end * width);
  kernels.write_kv({pool, 0, &all, 1, keys.data(), width, values.data(), width});
  // What the pool holds now.
  auto stored = [&](int side, int64_t position, float *to) {
    const char *rows = pool.rows(pages[static_cast<size_t>(position / c.block_size)], 0, side);
    kernels.to_float(rows + position % c.block_size * width * static_cast<int64_t>(size_of(c.dtype)),
                     c.dtype, to, width);
  };
  double worst = 0;
  for (int64_t p = 0; p < end; ++p) {
    stored(0, p, keys.data() + p * width);
    stored(1, p, values.data() + p * width);
  }
  std::vector<float> queries = numbers(c.n_tokens * n_heads * c.head_dim), out(queries.size());
  float scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  AttentionCall call{pool,           0,     &run,     1,         queries.data(),
                     n_heads * c.head_dim, out.data(), n_heads * c.head_dim,
                     static_cast<int32_t>(n_heads), scale, c.window, c.softcap, nullptr};
  kernels.attend(call);
  for (int64_t t = 0; t < c.n_tokens; ++t)
    for (int64_t h = 0; h < n_heads; ++h) {
      const float *q = queries.data() + (t * n_heads + h) * c.head_dim;
      int64_t last = c.before + t, offset = h / c.n_shared * c.head_dim;
      int64_t first = c.window > 0 && last - c.window + 1 > 0 ? last - c.window + 1 : 0;
      std::vector<double> sums(static_cast<size_t>(c.head_dim));
      double total = 0;
      for (int64_t p = first; p <= last; ++p) {
        double score = 0;
        for (int d = 0; d < c.head_dim; ++d)
          score += static_cast<double>(q[d]) * keys[static_cast<size_t>(p * width + offset + d)];
        score *= scale;
        if (c.softcap > 0)
          score = c.softcap * std::tanh(score / c.softcap);
        double weight = std::exp(score);
        total += weight;
        for (int d = 0; d < c.head_dim; ++d)
          sums[static_cast<size_t>(d)] +=
              weight * values[static_cast<size_t>(p * width + offset + d)];
      }
      for (int d = 0; d < c.head_dim; ++d) {
        double error = std::fabs(sums[static_cast<size_t>(d)] / total -
                                 out[static_cast<size_t>((t * n_heads + h) * c.head_dim + d)]);
        if (!(error <= worst))
          worst = error;
      }
    }
  return worst;
}

} // namespace

int main() {
  set_threads(2);
  const Kernels *all[8];
  int n = list_kernels(all, 8), failed = 0;
  for (int i = 0; i < n; ++i) {
    double worst = 0;
    for (DType dtype : {DType::float32, DType::bfloat16, DType::float16})
      for (int head_dim : {32, 33, 64, 80})
        for (int64_t n_tokens : {1, 3, 70})
          for (int64_t window : {0, 50}) {
            double error = compare(*all[i], {dtype, head_dim, 2, 3, 16, 200, n_tokens, window,
                                             window ? 20.0f : 0.0f});
            bool pairs = std::strcmp(all[i]->name, "avx512_bf16") == 0 && dtype == DType::bfloat16;
            if (!(error < (pairs ? 2e-2 : 2e-5)))
              failed = 1;
            if (!(error <= worst))
              worst = error;
          }
    std::printf("%s: largest error %.2g\n", all[i]->name, worst);
  }
  return failed;
}
