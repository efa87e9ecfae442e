// Find the likeliest tokens of a row without sorting it.
//
// The row's scan keeps the highest score of each chunk. With k chunks or more, the k-th highest of
// these bounds the k-th highest score from below; and chunks below a bound are not looked at again.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

constexpr int64_t kChunk = 128;

// Tokens of a row, rising, with their scores.
struct TokenList {
  int64_t n;
  int32_t *tokens;
  float *scores;
};

struct ScannedRow {
  const float *scores;
  int64_t n, n_chunks;
  float *chunk_highest; // [n_chunks]
  float highest;
  bool has_nan;
};

// Find the highest scores of a row's chunks.
inline void scan(ScannedRow &row) {
  Ints largest_bits{};
  row.highest = -__builtin_inff();
  for (int64_t chunk = 0; chunk < row.n_chunks; ++chunk) {
    const float *scores = row.scores + chunk * kChunk;
    int64_t n = row.n - chunk * kChunk < kChunk ? row.n - chunk * kChunk : kChunk;
    Floats highest = spread(-__builtin_inff());
    auto look = [&](Floats some) {
      Ints bits = reinterpret_cast<Ints &>(some) & 0x7fffffff;
      largest_bits = bits > largest_bits ? bits : largest_bits;
      highest = larger(some, highest);
    };
    int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      look(load(scores + i));
    if (whole < n)
      look(load_end(scores + whole, n - whole));
    float most = largest(highest);
    row.chunk_highest[chunk] = most;
    row.highest = most > row.highest ? most : row.highest;
  }
  row.has_nan = false;
  for (int i = 0; i < kLanes; ++i)
    row.has_nan |= largest_bits[i] > 0x7f800000;
}

inline bool is_finite(const ScannedRow &row) {
  return !row.has_nan && row.highest - row.highest == 0;
}

// Return the first token with the highest score, or the first one that is no number.
inline int64_t best_token(const ScannedRow &row) {
  if (row.has_nan) {
    for (int64_t i = 0; i < row.n; ++i)
      if (row.scores[i] != row.scores[i])
        return i;
  }
  int64_t chunk = 0;
  while (chunk + 1 < row.n_chunks && row.chunk_highest[chunk] != row.highest)
    ++chunk;
  int64_t i = chunk * kChunk;
  while (i + 1 < row.n && row.scores[i] != row.highest)
    ++i;
  return i;
}

// List the tokens whose scores are at least `bound`. Lists have room for a whole row.
inline void gather(const ScannedRow &row, float bound, TokenList &list) {
  int64_t n = 0;
  for (int64_t chunk = 0; chunk < row.n_chunks; ++chunk) {
    if (!(row.chunk_highest[chunk] >= bound))
      continue;
    int64_t end = row.n < (chunk + 1) * kChunk ? row.n : (chunk + 1) * kChunk;
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      list.tokens[n] = static_cast<int32_t>(i);
      list.scores[n] = row.scores[i];
      n += row.scores[i] >= bound;
    }
  }
  list.n = n;
}

// A number that rises with the score; 0.0 and -0.0 are equal.
inline uint32_t order_of(float score) {
  score += 0.0f;
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Scores that stay: all above `score`, whose weights are `above`, and some that equal it.
struct Edge {
  float score;
  double above;
};

// Find the highest score with which the weights of all that are no lower reach `wanted`; without
// weights each counts as 1. Three passes over the scores: by the upper, middle and lower bits.
inline Edge find_edge(const float *scores, const float *weights, int64_t n, double wanted) {
  constexpr int kBits[] = {11, 11, 10};
  double sums[2048];
  bool used[2048];
  uint32_t found = 0, known = 0;
  double above = 0;
  int shift = 32;
  for (int bits : kBits) {
    shift -= bits;
    uint32_t low = (1u << bits) - 1;
    memset(sums, 0, sizeof sums);
    memset(used, 0, sizeof used);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t order = order_of(scores[i]);
      if ((order & known) != found)
        continue;
      sums[(order >> shift) & low] += weights ? static_cast<double>(weights[i]) : 1.0;
      used[(order >> shift) & low] = true;
    }
    // The lowest one that is used, where all together do not reach it.
    uint32_t bin = low, last = low;
    double before = above, before_last = above;
    for (;; --bin) {
      if (used[bin]) {
        last = bin;
        before_last = before;
        before += sums[bin];
        if (before >= wanted)
          break;
      }
      if (bin == 0)
        break;
    }
    above = before_last;
    found |= last << shift;
    known |= low << shift;
  }
  uint32_t word = found & 0x80000000u ? found & 0x7fffffffu : ~found;
  Edge edge{0, above};
  memcpy(&edge.score, &word, 4);
  return edge;
}

// Leave the scores above an edge and the first `n_equal` that equal it.
inline void cut(TokenList &list, float edge, int64_t n_equal) {
  int64_t n = 0;
  for (int64_t i = 0; i < list.n; ++i) {
    bool stays = list.scores[i] > edge || (list.scores[i] == edge && n_equal-- > 0);
    list.tokens[n] = list.tokens[i];
    list.scores[n] = list.scores[i];
    n += stays;
  }
  list.n = n;
}

// List the k highest scores that are at least `least`; of equal ones the lower token.
inline void gather_best(const ScannedRow &row, int64_t k, float least, TokenList &list) {
  float bound = least;
  if (k <= row.n_chunks) {
    float reached = find_edge(row.chunk_highest, nullptr, row.n_chunks, static_cast<double>(k)).score;
    bound = reached > bound ? reached : bound;
  }
  gather(row, bound, list);
  if (list.n <= k)
    return;
  Edge edge = find_edge(list.scores, nullptr, list.n, static_cast<double>(k));
  cut(list, edge.score, k - static_cast<int64_t>(edge.above));
}

}}} // namespace
