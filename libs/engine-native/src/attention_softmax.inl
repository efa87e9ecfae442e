// The online softmax of attention, on rows of scores.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Exponentials are powers of two: scores carry this factor.
constexpr float kLog2E = 1.44269504088896341f;
// The largest score of a row that has seen no key; finite, so that differences are numbers.
constexpr float kLowest = -3e38f;

// The factor of queries: scores of packed queries are in powers of two, or still to be capped.
inline float query_factor(const AttentionCall &call) {
  return call.softcap > 0 ? call.scale : call.scale * kLog2E;
}

inline void cap_scores(float *scores, int64_t n, float softcap) {
  float inverse = 1.0f / softcap;
  // Of the largest caps, cap·log2(e) is no float.
  for (int64_t i = 0; i < n; i += kLanes)
    store(scores + i, tanh(load(scores + i) * inverse) * softcap * kLog2E);
}

inline void fill(float *to, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i)
    to[i] = value;
}

// Replace n scores by their weights 2^(score - most), where `most` and `total` of the row are
// brought up to date; return what earlier sums are multiplied by. n is a multiple of the vector;
// with `pairs` of two vectors: then the weights are bfloat16, from the row's begin on.
template <bool pairs>
inline float weigh_scores(float *scores, int64_t n, float &most, float &total) {
  Floats highest = spread(most);
  for (int64_t i = 0; i < n; i += kLanes)
    highest = larger(load(scores + i), highest);
  float higher = largest(highest);
  Floats weights{};
#if HALFMOON_PAIRS
  if constexpr (pairs) {
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
      Floats low = power_of_two<true>(load(scores + i) - higher);
      Floats high = power_of_two<true>(load(scores + i + kLanes) - higher);
      weights += low + high;
      __m512bh rounded =
          _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
      memcpy(scores + i / 2, &rounded, sizeof rounded);
    }
  }
#endif
  if constexpr (!pairs) {
    for (int64_t i = 0; i < n; i += kLanes) {
      Floats weight = power_of_two<false>(load(scores + i) - higher);
      weights += weight;
      store(scores + i, weight);
    }
  }
  float keep = higher > most ? power_of_two(most - higher) : 1.0f;
  total = total * keep + sum_all(weights);
  most = higher;
  return keep;
}

}}} // namespace
