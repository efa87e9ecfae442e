// Weights of tokens, exp((score - highest) / temperature), with the same bits on every instruction
// set as in halfmoon_engine/sampling/exact_weights.py: products and sums are never fused, and
// weights are multiples of 2^-33, so that sums in double are exact in any order.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Return a product that the compiler can't fuse with a sum.
inline Floats apart(Floats product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// Smaller exponents give no weight.
constexpr float kLeastExponent = -40.0f;
// Adding and removing it rounds to a whole number, to a multiple of 2^-33, and to one of 2^-17.
constexpr float kWholes = 12582912.0f, kGrains = 0x1p-10f, kCoarse = 96.0f;

// How scores become weights. Scores below `least` have none.
struct Weighing {
  float highest, scale, least;
};

// Weights of no more than 1. Not `grained`: as float32 has them, for sums that may be inexact.
template <bool grained> inline Floats weigh(Floats scores, const Weighing &by) {
  Floats exponent = apart((scores - by.highest) * by.scale);
  Floats fraction = larger(exponent, spread(kLeastExponent));
  Floats shifted = fraction + kWholes;
  Words shifts = reinterpret_cast<Words &>(shifted) << 23;
  fraction = fraction - (shifted - kWholes);
  // 2^fraction for -0.5 … 0.5
  Floats p = apart(fraction * 0x1.5bba14p-10f) + 0x1.3cea88p-7f;
  p = apart(p * fraction) + 0x1.c6b752p-5f;
  p = apart(p * fraction) + 0x1.ebf9bcp-3f;
  p = apart(p * fraction) + 0x1.62e42ap-1f;
  p = apart(p * fraction) + 1.0f;
  Words bits = reinterpret_cast<Words &>(p) + shifts;
  Floats weights = reinterpret_cast<Floats &>(bits);
  if constexpr (grained)
    weights = (weights + kGrains) - kGrains;
  else
    weights = exponent > kLeastExponent ? weights : Floats{};
  return scores >= by.least ? weights : Floats{};
}

// Load the last n < kLanes scores; -inf follows them.
inline Floats load_end(const float *scores, int64_t n) {
  float padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i)
    padded[i] = i < n ? scores[i] : -__builtin_inff();
  return load(padded);
}

inline Floats load_some(const float *scores, int64_t n) {
  return n >= kLanes ? load(scores) : load_end(scores, n);
}

// Scores of a block: sums of so many vectors fit in float32 without rounding.
constexpr int64_t kBlock = 128 * kLanes;

// Sum the weights of up to kBlock scores. A weight is a coarse part, a multiple of 2^-17, and a
// rest below it: each lane's sum of 128 of either is exact in float32.
template <bool grained> inline double sum_block(const float *scores, int64_t n, const Weighing &by) {
  Floats coarse{}, rest{};
  auto add = [&](Floats some) {
    Floats weights = weigh<grained>(some, by);
    Floats rounded = (weights + kCoarse) - kCoarse;
    coarse += rounded;
    rest += weights - rounded;
  };
  int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    add(load(scores + i));
  if (whole < n)
    add(load_end(scores + whole, n - whole));
  double total = 0;
  for (int i = 0; i < kLanes; ++i)
    total += static_cast<double>(coarse[i]) + static_cast<double>(rest[i]);
  return total;
}

// Sum the weights of n scores; keep the sums of the blocks where `blocks` is given.
template <bool grained>
double sum_weights(const float *scores, int64_t n, const Weighing &by, double *blocks) {
  double total = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    double sum = sum_block<grained>(scores + i, n - i < kBlock ? n - i : kBlock, by);
    if (blocks)
      blocks[i / kBlock] = sum;
    total += sum;
  }
  return total;
}

// Return the first place where the cumulated weights are above `mass`, which is below their sum.
int64_t pick(const float *scores, int64_t n, const Weighing &by, const double *blocks, double mass) {
  double before = 0;
  int64_t start = 0, last = n - 1; // `last` has a weight: of more than 2^20 weights sums are rounded
  while (start + kBlock < n && before + blocks[start / kBlock] <= mass) {
    before += blocks[start / kBlock];
    start += kBlock;
  }
  for (int64_t i = start; i < n; i += kLanes) {
    float weights[kLanes];
    store(weights, weigh<true>(load_some(scores + i, n - i), by));
    for (int64_t lane = 0; lane < kLanes && i + lane < n; ++lane) {
      if (weights[lane] == 0)
        continue;
      last = i + lane;
      before += static_cast<double>(weights[lane]);
      if (before > mass)
        return last;
    }
  }
  return last;
}

}}} // namespace
