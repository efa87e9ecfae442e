// Rounds as halfmoon_engine/sampling/sampler.py does: biases and repetition in float32, presence and
// frequency in double.
#include "score_changes.h"

namespace halfmoon {
namespace {

constexpr uint32_t kSeen = 1u << 31;

void keep(ChangedScores &before, int32_t token, float score) {
  before.tokens[before.n] = token;
  before.scores[before.n++] = score;
}

// Each token's value comes of its first score; of several biases the last one counts.
void add_biases(const ScoreChanges &changes, float *scores, ChangedScores &before) {
  for (int64_t i = 0; i < changes.n_biased; ++i)
    keep(before, changes.biased[i], scores[changes.biased[i]]);
  for (int64_t i = 0; i < changes.n_biased; ++i)
    scores[changes.biased[i]] = before.scores[i] + changes.biases[i];
}

void penalise(const ScoreChanges &changes, float *scores, uint32_t *counts, ChangedScores &before) {
  int64_t first = before.n;
  for (int64_t i = 0; i < changes.n_history; ++i) {
    int32_t token = changes.history[i];
    if ((counts[token] & kSeen) == 0) {
      keep(before, token, scores[token]);
      counts[token] |= kSeen;
    }
    counts[token] += i >= changes.n_prompt;
  }
  bool counted = changes.presence != 0 || changes.frequency != 0;
  for (int64_t i = first; i < before.n; ++i) {
    int32_t token = before.tokens[i];
    float score = before.scores[i];
    if (changes.repetition != 1)
      score = score > 0 ? score / changes.repetition : score * changes.repetition;
    uint32_t count = counts[token] & ~kSeen;
    if (counted && count > 0) {
      volatile double repeated = changes.frequency * count; // not fused with the sum
      score = static_cast<float>(static_cast<double>(score) - (repeated + changes.presence));
    }
    scores[token] = score;
    counts[token] = 0;
  }
}

} // namespace

void change_scores(const ScoreChanges &changes, float *scores, uint32_t *counts,
                   ChangedScores &before) {
  before.n = 0;
  if (changes.n_biased > 0)
    add_biases(changes, scores, before);
  if (changes.n_history > 0)
    penalise(changes, scores, counts, before);
}

void restore_scores(const ChangedScores &before, float *scores) {
  for (int64_t i = before.n - 1; i >= 0; --i)
    scores[before.tokens[i]] = before.scores[i];
}

} // namespace halfmoon
