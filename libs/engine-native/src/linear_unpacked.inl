// Linears over weights that stay row-major, as a head that shares its embedding's memory.
//
// Sums run along the inputs: each lane adds every kLanes-th product, and lanes are added at the end.
// A block takes kRowsAt rows of weights, each a stream from memory, and up to kXAt rows of x; further
// rows of x find the weights in the first-level cache.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

#if HALFMOON_LANES == 16 || defined(__aarch64__)
constexpr int kRowsAt = 6, kXAt = 4;
#else
constexpr int kRowsAt = 4, kXAt = 2;
#endif

// Each takes kStep inputs of a row of weights at once. x comes prepared (`prepare_x`), with zeros up
// to a multiple of kStep, so that the last step of a row can read a padded copy of its rest.
struct UnpackedFloat32 {
  static constexpr int kStep = kLanes, kSize = 4, kXBytes = 4;
  struct Weights { Floats all; };
  static inline Weights read(const char *w) { return {load(reinterpret_cast<const float *>(w))}; }
  static inline Floats add(Floats sum, const Weights &w, const char *x) {
    return sum + w.all * load(reinterpret_cast<const float *>(x));
  }
  static void prepare(const float *x, char *to) { memcpy(to, x, kStep * 4); }
};

struct UnpackedFloat16 {
  static constexpr int kStep = kLanes, kSize = 2, kXBytes = 4;
  struct Weights { Floats all; };
  static inline Weights read(const char *w) { return {load_f16(w)}; }
  static inline Floats add(Floats sum, const Weights &w, const char *x) {
    return sum + w.all * load(reinterpret_cast<const float *>(x));
  }
  static void prepare(const float *x, char *to) { memcpy(to, x, kStep * 4); }
};

#ifdef HALFMOON_BF16_DOT
struct UnpackedBfloat16 {
  static constexpr int kStep = 2 * kLanes, kSize = 2, kXBytes = 2;
  struct Weights { __m512bh all; };
  static inline Weights read(const char *w) {
    return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(w))};
  }
  static inline Floats add(Floats sum, const Weights &w, const char *x) {
    __m512bh pairs = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x));
    return reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), w.all, pairs));
  }
  static void prepare(const float *x, char *to) { round_to_pairs(x, to); }
};
#else
// Even and odd numbers of x lie apart, as widening pairs of weights parts them.
struct UnpackedBfloat16 {
  static constexpr int kStep = 2 * kLanes, kSize = 2, kXBytes = 4;
  struct Weights { Floats even, odd; };
  static inline Weights read(const char *w) {
    Words pairs = load_words(w);
    return {even_of(pairs), odd_of(pairs)};
  }
  static inline Floats add(Floats sum, const Weights &w, const char *x) {
    const float *numbers = reinterpret_cast<const float *>(x);
    sum += w.even * load(numbers);
    return sum + w.odd * load(numbers + kLanes);
  }
  static void prepare(const float *x, char *to) {
    float *numbers = reinterpret_cast<float *>(to);
    for (int i = 0; i < kLanes; ++i) {
      numbers[i] = x[2 * i];
      numbers[kLanes + i] = x[2 * i + 1];
    }
  }
};
#endif

#if HALFMOON_LANES == 16
constexpr int kTreeLeaves = 16;

// Add the lanes of 16 vectors, halves first; returns all sums, that of vector i in lane_of_sum(i).
// Two vectors share an addition: one alone takes as many instructions as 16 take here by three.
inline Floats add_lanes(const Floats (&v)[kTreeLeaves]) {
  Floats eights[8], fours[4], twos[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    Floats a = v[2 * i], b = v[2 * i + 1];
    eights[i] =
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Floats a = eights[2 * i], b = eights[2 * i + 1];
    fours[i] =
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
        __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    Floats a = fours[2 * i], b = fours[2 * i + 1];
    twos[i] =
        __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
        __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return __builtin_shufflevector(twos[0], twos[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12,
                                 28, 14, 30) +
         __builtin_shufflevector(twos[0], twos[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13,
                                 29, 15, 31);
}
constexpr int lane_of_sum(int i) {
  return (i & 1) << 2 | (i & 2) << 2 | (i & 4) >> 1 | (i & 8) >> 3;
}
#else
constexpr int kTreeLeaves = 1;
inline Floats add_lanes(const Floats (&v)[1]) {
#if HALFMOON_LANES == 8
  auto four = __builtin_shufflevector(v[0], v[0], 0, 1, 2, 3) +
              __builtin_shufflevector(v[0], v[0], 4, 5, 6, 7);
#else
  auto four = v[0];
#endif
  auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return Floats{two[0] + two[1]};
}
constexpr int lane_of_sum(int) { return 0; }
#endif

struct UnpackedJob {
  const char *weights;
  const char *x;   // prepared: [n_rows] of x_bytes
  int64_t x_bytes;
  int64_t n_out, n_in, n_rows;
  float *y;
  int64_t y_stride;
};

// Products of N rows of weights from `o` on with R rows of x from `row` on, the `group`-th of
// `n_groups` groups of rows of x.
template <typename Kind, int N, int R>
void dot_rows(const UnpackedJob &job, int64_t o, int64_t row, int64_t group, int64_t n_groups) {
  const char *w = job.weights + o * job.n_in * Kind::kSize;
  const char *x = job.x + row * job.x_bytes;
  int64_t row_bytes = job.n_in * Kind::kSize, whole = job.n_in / Kind::kStep;
  Floats sums[N][R] = {};
  auto step = [&](const char *from, int64_t stride, const char *xs) {
    typename Kind::Weights weights[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      weights[n] = Kind::read(from + n * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
        sums[n][r] = Kind::add(sums[n][r], weights[n], xs + r * job.x_bytes);
  };
  // Meanwhile fetch the next rows of weights: each group of rows of x its share of them.
  const char *next = w + N * row_bytes;
  constexpr int kAhead = N == 1 ? 1 : N / 2;
  if (n_groups == 1) {
    for (int64_t i = 0; i < whole; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
        __builtin_prefetch(next + n * row_bytes, 0, kPrefetchHint);
      next += Kind::kStep * Kind::kSize;
      step(w, row_bytes, x);
      w += Kind::kStep * Kind::kSize;
      x += Kind::kStep * Kind::kXBytes;
    }
  } else {
    int64_t first = N * group / n_groups, last = N * (group + 1) / n_groups - 1;
    const char *ahead[kAhead];
    for (int n = 0; n < kAhead; ++n)
      ahead[n] = next + (first + n < last ? first + n : last) * row_bytes;
    for (int64_t i = 0; i < whole; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < kAhead; ++n)
        __builtin_prefetch(ahead[n] + i * Kind::kStep * Kind::kSize, 0, kPrefetchHint);
      step(w, row_bytes, x);
      w += Kind::kStep * Kind::kSize;
      x += Kind::kStep * Kind::kXBytes;
    }
  }
  int64_t rest = job.n_in - whole * Kind::kStep;
  if (rest > 0) {
    alignas(64) char padded[N][Kind::kStep * Kind::kSize] = {};
    for (int n = 0; n < N; ++n)
      memcpy(padded[n], w + n * row_bytes, static_cast<size_t>(rest * Kind::kSize));
    step(padded[0], Kind::kStep * Kind::kSize, x);
  }
  constexpr int kSums = N * R;
#pragma GCC unroll 8
  for (int first = 0; first < kSums; first += kTreeLeaves) {
    Floats leaves[kTreeLeaves];
#pragma GCC unroll 16
    for (int i = 0; i < kTreeLeaves; ++i)
      leaves[i] = first + i < kSums ? sums[(first + i) % N][(first + i) / N] : Floats{};
    float totals[kLanes];
    store(totals, add_lanes(leaves));
    for (int i = 0; i < kTreeLeaves && first + i < kSums; ++i)
      job.y[(row + (first + i) / N) * job.y_stride + o + (first + i) % N] = totals[lane_of_sum(i)];
  }
}

// Rows of x of one block of weights, in equal groups of at most kXAt.
template <typename Kind, int N> void dot_all_rows(const UnpackedJob &job, int64_t o) {
  int64_t n_groups = (job.n_rows + kXAt - 1) / kXAt;
  for (int64_t group = 0; group < n_groups; ++group) {
    int64_t row = job.n_rows * group / n_groups;
    switch (job.n_rows * (group + 1) / n_groups - row) {
    case 1: dot_rows<Kind, N, 1>(job, o, row, group, n_groups); break;
    case 2: dot_rows<Kind, N, 2>(job, o, row, group, n_groups); break;
    case 3: if constexpr (kXAt >= 3) dot_rows<Kind, N, 3>(job, o, row, group, n_groups); break;
    case 4: if constexpr (kXAt >= 4) dot_rows<Kind, N, 4>(job, o, row, group, n_groups); break;
    case 5: if constexpr (kXAt >= 5) dot_rows<Kind, N, 5>(job, o, row, group, n_groups); break;
    default: if constexpr (kXAt >= 6) dot_rows<Kind, N, 6>(job, o, row, group, n_groups); break;
    }
  }
}

template <typename Kind>
void prepare_x(const float *x, int64_t x_stride, int64_t n_in, int64_t n_rows, char *begin,
               int64_t x_bytes) {
  float rest[Kind::kStep];
  for (int64_t row = 0; row < n_rows; ++row) {
    const float *from = x + row * x_stride;
    char *to = begin + row * x_bytes;
    int64_t i = 0;
    for (; i + Kind::kStep <= n_in; i += Kind::kStep, to += Kind::kStep * Kind::kXBytes)
      Kind::prepare(from + i, to);
    if (i < n_in) {
      memset(rest, 0, sizeof rest);
      memcpy(rest, from + i, static_cast<size_t>(n_in - i) * 4);
      Kind::prepare(rest, to);
    }
  }
}

template <typename Kind>
void dot(UnpackedJob job, const float *x, int64_t x_stride) {
  constexpr int64_t kXRows = 32; // rows of x at a time: they stay in the second-level cache
  int64_t steps = (job.n_in + Kind::kStep - 1) / Kind::kStep, n_rows = job.n_rows;
  job.x_bytes = steps * Kind::kStep * Kind::kXBytes + 64; // no multiple of a cache's ways
  float *y = job.y;
  int64_t row_bytes = job.n_in * Kind::kSize;
  int64_t task_rows = (64 << 10) / (row_bytes * kRowsAt + 1) * kRowsAt;
  task_rows = task_rows < kRowsAt ? kRowsAt : task_rows;
  for (int64_t row = 0; row < n_rows; row += kXRows) {
    job.n_rows = n_rows - row < kXRows ? n_rows - row : kXRows;
    job.y = y + row * job.y_stride;
    char *prepared = static_cast<char *>(
        scratch(ScratchSlot::call_rows, static_cast<size_t>(job.n_rows * job.x_bytes)));
    prepare_x<Kind>(x + row * x_stride, x_stride, job.n_in, job.n_rows, prepared,
                    job.x_bytes);
    job.x = prepared;
    parallel_for((job.n_out + task_rows - 1) / task_rows, [&](int64_t task, int) {
      int64_t o = task * task_rows, end = o + task_rows < job.n_out ? o + task_rows : job.n_out;
      for (; o + kRowsAt <= end; o += kRowsAt)
        dot_all_rows<Kind, kRowsAt>(job, o);
      for (; o < end; ++o)
        dot_all_rows<Kind, 1>(job, o);
    });
  }
}

void linear_unpacked(const void *weights, DType dtype, int64_t n_out, int64_t n_in, const float *x,
                     int64_t x_stride, int64_t n_rows, float *y, int64_t y_stride) {
  UnpackedJob job{static_cast<const char *>(weights), nullptr, 0, n_out, n_in, n_rows, y, y_stride};
  switch (dtype) {
  case DType::float32:
    return dot<UnpackedFloat32>(job, x, x_stride);
  case DType::bfloat16:
    return dot<UnpackedBfloat16>(job, x, x_stride);
  case DType::float16:
    return dot<UnpackedFloat16>(job, x, x_stride);
  }
}

}}} // namespace
