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
  float inverse = 1.0f / softcap, factor = softcap * kLog2E;
  for (int64_t i = 0; i < n; i += kLanes)
    store(scores + i, tanh(load(scores + i) * inverse) * factor);
}

inline void fill(float *to, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i)
    to[i] = value;
}

// Replace n scores (whole vectors) by 2^(score - most), where `most` and `total` of the row are
// brought up to date; return what earlier sums are multiplied by.
template <bool rough>
inline float weigh_scores(float *scores, int64_t n, float &most, float &total) {
  Floats highest = spread(most);
  for (int64_t i = 0; i < n; i += kLanes)
    highest = larger(load(scores + i), highest);
  float higher = largest(highest);
  Floats weights{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats weight = power_of_two<rough>(load(scores + i) - higher);
    weights += weight;
    store(scores + i, weight);
  }
  float keep = higher > most ? power_of_two(most - higher) : 1.0f;
  total = total * keep + sum_all(weights);
  most = higher;
  return keep;
}

}}} // namespace
