// Draw tokens from rows of scores, and report log probabilities.
//
// A draw is that of halfmoon_engine/sampling/weighted_draw.py to the token: sums of weights are
// exact, and of equal scores the lower token is the likelier.
#include "sampling_weights.inl"
#include "sampling_select.inl"

namespace halfmoon { namespace HALFMOON_ISA { namespace {

constexpr float kLowestFinite = -3.402823466e38f;

// Memory of a row's draw.
struct DrawMemory {
  ScannedRow row;
  TokenList list;
  float *weights; // of the list
  double *blocks; // of the row or the list
};

inline int64_t aligned(int64_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

inline DrawMemory take_memory(const float *scores, int64_t n) {
  int64_t n_chunks = (n + kChunk - 1) / kChunk, n_blocks = (n + kBlock - 1) / kBlock;
  // A list's end is written before it is known whether it stays.
  int64_t each = aligned((n + kLanes) * 4), sums = aligned(n_blocks * 8);
  char *at = static_cast<char *>(scratch(
      ScratchSlot::sampling, static_cast<size_t>(3 * each + sums + aligned(n_chunks * 4))));
  DrawMemory memory{};
  memory.blocks = reinterpret_cast<double *>(at);
  memory.list.tokens = reinterpret_cast<int32_t *>(at + sums);
  memory.list.scores = reinterpret_cast<float *>(at + sums + each);
  memory.weights = reinterpret_cast<float *>(at + sums + 2 * each);
  memory.row = {scores, n, n_chunks, reinterpret_cast<float *>(at + sums + 3 * each), 0, false};
  return memory;
}

// Compute the weights of a list and return their sum.
inline double weigh_list(DrawMemory &memory, const Weighing &by) {
  const TokenList &list = memory.list;
  for (int64_t i = 0; i < list.n; i += kLanes)
    store(memory.weights + i, weigh<true>(load_some(list.scores + i, list.n - i), by));
  double total = 0;
  for (int64_t i = 0; i < list.n; ++i)
    total += static_cast<double>(memory.weights[i]);
  return total;
}

// List tokens from the likeliest on until their weights reach a mass.
inline void gather_mass(DrawMemory &memory, const Weighing &by, double wanted) {
  // Exponents of the tokens that are looked at; the next one is tried where they are too few.
  constexpr float kExponents[] = {-7.0f, -10.0f, -14.0f, -20.0f};
  for (float exponent : kExponents) {
    float bound = by.highest + exponent / by.scale;
    if (!(bound > by.least))
      break;
    gather(memory.row, bound, memory.list);
    if (weigh_list(memory, by) >= wanted)
      return;
  }
  gather(memory.row, by.least, memory.list);
  weigh_list(memory, by);
}

// Leave the fewest likeliest tokens of a list whose weights reach a mass. A token stays if those
// before it don't reach it.
inline void cut_mass(DrawMemory &memory, double wanted) {
  Edge edge = find_edge(memory.list.scores, memory.weights, memory.list.n, wanted);
  double before = edge.above;
  int64_t n_equal = 0;
  for (int64_t i = 0; i < memory.list.n; ++i)
    if (memory.list.scores[i] == edge.score) {
      if (n_equal > 0 && before >= wanted)
        break;
      before += static_cast<double>(memory.weights[i]);
      ++n_equal;
    }
  cut(memory.list, edge.score, n_equal);
}

int64_t draw_token(const DrawCall &call) {
  int64_t n = call.n_vocab;
  DrawMemory memory = take_memory(call.scores, n);
  scan(memory.row);
  if (call.scale == 0)
    return best_token(memory.row);
  if (!is_finite(memory.row))
    return static_cast<int64_t>(call.die * static_cast<double>(n));
  float highest = memory.row.highest;
  double least = static_cast<double>(highest) + call.min_p_gap;
  Weighing by{highest, call.scale,
              least > static_cast<double>(kLowestFinite) ? static_cast<float>(least) : kLowestFinite};
  if (call.top_k > 0 && call.top_k < n) {
    gather_best(memory.row, call.top_k, by.least, memory.list);
    double total = weigh_list(memory, by);
    if (call.top_p < 1)
      cut_mass(memory, call.top_p * total);
  } else if (call.top_p < 1) {
    double wanted = call.top_p * sum_weights<true>(call.scores, n, by, nullptr);
    gather_mass(memory, by, wanted);
    cut_mass(memory, wanted);
  } else {
    double total = sum_weights<true>(call.scores, n, by, memory.blocks);
    return pick(call.scores, n, by, memory.blocks, call.die * total);
  }
  const TokenList &list = memory.list;
  double total = sum_weights<true>(list.scores, list.n, by, memory.blocks);
  return list.tokens[pick(list.scores, list.n, by, memory.blocks, call.die * total)];
}

// Return false where the row's highest score is no finite number.
bool score_token(ScoreCall &call) {
  DrawMemory memory = take_memory(call.scores, call.n_vocab);
  scan(memory.row);
  if (!is_finite(memory.row))
    return false;
  float highest = memory.row.highest, own = call.scores[call.token];
  // Natural logarithms: of weights at temperature 1.
  Weighing by{highest, 1.44269504f, -__builtin_inff()};
  double sum = sum_weights<false>(call.scores, call.n_vocab, by, nullptr);
  double sum_log = static_cast<double>(highest) + __builtin_log(sum);
  call.logprob = static_cast<double>(own) - sum_log;
  call.rank = 1;
  for (int64_t chunk = 0; chunk < memory.row.n_chunks; ++chunk)
    if (memory.row.chunk_highest[chunk] > own) {
      int64_t end = (chunk + 1) * kChunk < call.n_vocab ? (chunk + 1) * kChunk : call.n_vocab;
      int32_t n = 0;
      for (int64_t i = chunk * kChunk; i < end; ++i)
        n += call.scores[i] > own;
      call.rank += n;
    }
  if (call.n_top == 0)
    return true;
  TokenList &list = memory.list;
  gather_best(memory.row, call.n_top, -__builtin_inff(), list);
  for (int64_t i = 0; i < list.n; ++i) {
    int32_t token = list.tokens[i];
    float score = list.scores[i];
    int64_t place = i;
    for (; place > 0 && list.scores[place - 1] < score; --place) {
      list.tokens[place] = list.tokens[place - 1];
      list.scores[place] = list.scores[place - 1];
    }
    list.tokens[place] = token;
    list.scores[place] = score;
  }
  for (int64_t i = 0; i < list.n; ++i)
    call.top[i] = {list.tokens[i], static_cast<double>(list.scores[i]) - sum_log};
  return true;
}

}}} // namespace
