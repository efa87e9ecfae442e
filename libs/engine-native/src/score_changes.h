// Biases and penalties of one row's scores, undone after its token is chosen.
#pragma once

#include <cstdint>

namespace halfmoon {

// What a request adds to its scores and takes from them. Tokens are in the vocabulary.
struct ScoreChanges {
  int32_t *biased; // [n_biased], to be freed; so are `biases` and `history`
  float *biases;
  int64_t n_biased;
  int32_t *history; // [n_history]: the prompt's tokens, then the output's
  int64_t n_history, n_prompt;
  float repetition;
  double presence, frequency;
};

// Scores as they were, in the order in which they were changed.
struct ChangedScores {
  int32_t *tokens; // [n_biased + n_history]
  float *scores;
  int64_t n;
};

// Add the biases, then apply the penalties: repetition divides (or, below zero, multiplies) the
// scores of all earlier tokens; presence and frequency are subtracted for the output's tokens.
// `counts` are n_vocab zeros, and are again afterwards.
void change_scores(const ScoreChanges &changes, float *scores, uint32_t *counts,
                   ChangedScores &before);
void restore_scores(const ChangedScores &before, float *scores);

} // namespace halfmoon
