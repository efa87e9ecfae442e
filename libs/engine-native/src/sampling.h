// What the sampling kernels take; see sampling.inl.
#pragma once

#include <cstdint>

namespace halfmoon {

// How a token is drawn from a row of scores.
struct DrawCall {
  const float *scores; // [n_vocab]
  int64_t n_vocab;     // 1 … 2^31 - 1
  float scale;         // log2(e) / temperature, finite and above 0; 0: take the highest score
  double min_p_gap;    // what a token may be below the highest score: at most 0; -inf: all stay
  int64_t top_k;       // 0: all stay
  double top_p;        // above 0; 1: all stay
  double die;          // in [0, 1)
};

struct TokenLogprob {
  int64_t token;
  double logprob;
};

// The log probability of a token and of the likeliest ones.
struct ScoreCall {
  const float *scores; // [n_vocab]
  int64_t n_vocab;     // 1 … 2^31 - 1
  int64_t token;       // in the vocabulary
  int64_t n_top;       // at most n_vocab
  double logprob;      // results from here on
  int64_t rank;        // 1: no token is likelier
  TokenLogprob *top;   // [n_top], highest first; of equal ones the lower token
};

} // namespace halfmoon
