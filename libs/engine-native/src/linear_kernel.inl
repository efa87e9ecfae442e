// Products of a block of rows with one panel, in registers.
//
// Rows come as `prepare_rows` leaves them: kRowWords 32-bit words from one row to the next, which is
// no multiple of a cache's ways, and zeros behind an odd last input. Each kernel adds to `sums`
// [R][kPanelOutputs] the products of one block of inputs, one input after the other. So a row's result does
// not depend on the rows beside it, nor on how inputs are cut into blocks.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Rows of a block: as many as leave registers for a panel's two vectors and one number of x.
#if HALFMOON_LANES == 16
constexpr int kGroupRows = 14;
#elif defined(__aarch64__)
constexpr int kGroupRows = 12;
#else
constexpr int kGroupRows = 6;
#endif

constexpr int64_t kBlockWords = 256;            // words of x of a block of inputs: 32 KiB of a panel
constexpr int64_t kRowWords = kBlockWords + 16; // from one prepared row to the next

// How far ahead a lone group of rows fetches weights.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int kPrefetchHint = 3;
constexpr int kPrefetchRows = 3; // fewer take no longer than the processor's own fetching

// How a kernel reads weights and x.
struct Float32Weights {
  using Word = float;
  static constexpr int64_t kStepBytes = kPanelOutputs * 4;
  static constexpr int kStepWords = 1;
  template <int R> static inline void step(const float *x, const char *w, Floats (&sums)[R][2]) {
    const float *weights = reinterpret_cast<const float *>(w);
    Floats left = load(weights), right = load(weights + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float number = x[r * kRowWords];
      sums[r][0] += left * number;
      sums[r][1] += right * number;
    }
  }
};

// Widen pairs of bfloat16 to their even and odd numbers.
inline Floats even_of(Words pairs) {
  Words words = pairs << 16;
  return reinterpret_cast<Floats &>(words);
}
inline Floats odd_of(Words pairs) {
  Words words = pairs & 0xffff0000u;
  return reinterpret_cast<Floats &>(words);
}
// From any even address: rows of an odd number of bfloat16 numbers start at such.
inline Words load_words(const void *p) {
  Words words;
  memcpy(&words, p, sizeof words);
  return words;
}

struct PairWeights {
  using Word = float;
  static constexpr int64_t kStepBytes = kPanelOutputs * 4;
  static constexpr int kStepWords = 2;
  template <int R> static inline void step(const float *x, const char *w, Floats (&sums)[R][2]) {
    Words left = load_words(w), right = load_words(w + kLanes * 4);
    Floats left_even = even_of(left), right_even = even_of(right);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float number = x[r * kRowWords];
      sums[r][0] += left_even * number;
      sums[r][1] += right_even * number;
    }
    Floats left_odd = odd_of(left), right_odd = odd_of(right);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float number = x[r * kRowWords + 1];
      sums[r][0] += left_odd * number;
      sums[r][1] += right_odd * number;
    }
  }
};

inline Floats load_f16(const void *p) {
#if HALFMOON_LANES == 16
  return reinterpret_cast<Floats>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i *>(p))));
#elif HALFMOON_LANES == 8
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(
      vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t *>(p)))));
#else
  const uint16_t *halves = static_cast<const uint16_t *>(p);
  return Floats{f16_to_float(halves[0]), f16_to_float(halves[1]), f16_to_float(halves[2]),
                f16_to_float(halves[3])};
#endif
}

struct HalfWeights {
  using Word = float;
  static constexpr int64_t kStepBytes = kPanelOutputs * 2;
  static constexpr int kStepWords = 1;
  template <int R> static inline void step(const float *x, const char *w, Floats (&sums)[R][2]) {
    Floats left = load_f16(w), right = load_f16(w + kLanes * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float number = x[r * kRowWords];
      sums[r][0] += left * number;
      sums[r][1] += right * number;
    }
  }
};

#ifdef HALFMOON_BF16_DOT
// x is rounded to bfloat16 too, in pairs.
struct DotWeights {
  using Word = uint32_t;
  static constexpr int64_t kStepBytes = kPanelOutputs * 4;
  static constexpr int kStepWords = 1;
  template <int R> static inline void step(const uint32_t *x, const char *w, Floats (&sums)[R][2]) {
    __m512bh left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
    __m512bh right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + kLanes * 4));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      __m512bh pair =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[r * kRowWords])));
      sums[r][0] = reinterpret_cast<Floats>(
          _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[r][0]), left, pair));
      sums[r][1] = reinterpret_cast<Floats>(
          _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[r][1]), right, pair));
    }
  }
};
#endif

// `ahead`: memory to fetch meanwhile, `ahead_bytes` further at each step.
using BlockKernel = void (*)(const void *x, const char *w, int64_t steps, float *sums, bool begin,
                             const char *ahead, int64_t ahead_bytes);

template <typename Weights, int R>
void block_kernel(const void *rows, const char *w, int64_t steps, float *sums, bool begin,
                  const char *ahead, int64_t ahead_bytes) {
  const typename Weights::Word *x = static_cast<const typename Weights::Word *>(rows);
  Floats block[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    block[r][0] = begin ? Floats{} : load(sums + r * kPanelOutputs);
    block[r][1] = begin ? Floats{} : load(sums + r * kPanelOutputs + kLanes);
  }
  for (int64_t i = 0; i < steps; ++i) {
    if constexpr (R >= kPrefetchRows) {
      __builtin_prefetch(ahead, 0, kPrefetchHint);
      if constexpr (Weights::kStepBytes > 64)
        __builtin_prefetch(ahead + 64, 0, kPrefetchHint);
      ahead += ahead_bytes;
    }
    Weights::template step<R>(x, w, block);
    x += Weights::kStepWords;
    w += Weights::kStepBytes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(sums + r * kPanelOutputs, block[r][0]);
    store(sums + r * kPanelOutputs + kLanes, block[r][1]);
  }
}

// Kernels for 1 … kGroupRows rows.
template <typename Weights, int R> struct FillKernels {
  static void fill(BlockKernel *table) {
    table[R] = block_kernel<Weights, R>;
    FillKernels<Weights, R - 1>::fill(table);
  }
};
template <typename Weights> struct FillKernels<Weights, 0> {
  static void fill(BlockKernel *) {}
};
template <typename Weights> struct BlockKernels {
  BlockKernel of_rows[kGroupRows + 1] = {};
  BlockKernels() { FillKernels<Weights, kGroupRows>::fill(of_rows); }
};
template <typename Weights> const BlockKernel *kernels_of() {
  static const BlockKernels<Weights> kernels;
  return kernels.of_rows;
}

// Widen one block of a panel to float32: rows of many blocks read it again and again.
void widen_panel(const char *w, DType dtype, int64_t n_inputs, float *out) {
  if (dtype == DType::float16) {
    for (int64_t i = 0; i < n_inputs * kPanelOutputs; i += kLanes)
      store(out + i, load_f16(w + i * 2));
    return;
  }
  for (int64_t k = 0; k < n_inputs; k += 2) {
    Words left = load_words(w), right = load_words(w + kLanes * 4);
    store(out, even_of(left));
    store(out + kLanes, even_of(right));
    store(out + kPanelOutputs, odd_of(left));
    store(out + kPanelOutputs + kLanes, odd_of(right));
    w += kPanelOutputs * 4;
    out += 2 * kPanelOutputs;
  }
}

// ---- rows of x

// Copy inputs `from` … `end`-1 of rows of x to prepared rows; `even`: pad to whole pairs by a zero.
void copy_rows(const float *x, int64_t x_stride, int64_t n_rows, int64_t from, int64_t end, bool even,
               float *to) {
  int64_t n = end - from, whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < n_rows; ++row) {
    const float *at = x + row * x_stride + from;
    float *out = to + row * kRowWords;
    for (int64_t i = 0; i < whole; i += kLanes)
      store(out + i, load(at + i));
    for (int64_t i = whole; i < n; ++i)
      out[i] = at[i];
    if (even && n % 2 != 0)
      out[n] = 0;
  }
}

#ifdef HALFMOON_BF16_DOT
// Round 32 numbers to bfloat16 in their order.
inline void round_to_pairs(const float *from, void *to) {
  __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(pairs));
}

void round_row(const float *from, int64_t n, uint32_t *to) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    round_to_pairs(from + i, to + i / 2);
  if (i < n) {
    float rest[32] = {};
    uint32_t pairs[16];
    memcpy(rest, from + i, static_cast<size_t>(n - i) * 4);
    round_to_pairs(rest, pairs);
    memcpy(to + i / 2, pairs, static_cast<size_t>((n - i + 1) / 2) * 4);
  }
}
#endif

}}} // namespace
