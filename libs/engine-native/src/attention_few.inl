// Attention of runs with few rows a head: decode, and a few tokens after a cached prefix. Bound by
// memory: keys and values are read once, token by token over all heads of the task, as pages hold
// them. The lanes of a vector of scores are rows of all heads, so that a softmax needs no sums
// across lanes.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Tokens of one step: first their keys are read, then their values.
constexpr int64_t kStepTokens = 16;
// Tokens whose keys, or values, are read at the same time. Of more, reads are further from the
// order of memory, and slower; but narrow rows are bound by instructions.
constexpr int kFewAtOnce = 2, kMostAtOnce = 4;
constexpr int64_t kNarrowBytes = 1024;
// Rows are fetched so many bytes, and at most one step, before they are read.
constexpr int64_t kFetchBytes = 8 * 1024;
constexpr int64_t kCacheLine = 64;

// Always inline: GCC takes a function that only prefetches for one without effects, and drops
// its calls.
inline __attribute__((always_inline)) void fetch_ahead(const char *const *rows, int64_t n,
                                                       int64_t offset, int64_t n_bytes) {
  for (int64_t i = 0; i < n; ++i) {
    const char *row = rows[i] + offset;
    int64_t b = 0;
    for (; b + 4 * kCacheLine <= n_bytes; b += 4 * kCacheLine)
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line)
        __builtin_prefetch(row + b + line * kCacheLine, 0, 3);
    for (; b < n_bytes; b += kCacheLine)
      __builtin_prefetch(row + b, 0, 3);
  }
}

// sums[t, r] += products of numbers from d on: all of two vectors, or the first `left`.
template <DType dtype, int R, int T, bool whole>
inline __attribute__((always_inline)) void multiply_some(const float *queries, int64_t dims,
                                                         const char *const (&keys)[T], int64_t d,
                                                         int64_t left, Floats (&sums)[T][R]) {
  Floats low[T], high[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
    load_two<dtype>(keys[t] + d * kNumberBytes<dtype>, whole ? 2 * kLanes : left, low[t], high[t]);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Floats first = load(queries + r * dims + d), second = load(queries + r * dims + d + kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
      sums[t][r] += first * low[t];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
      sums[t][r] += second * high[t];
  }
}

// products[t, r] = a vector whose sum is queries[r]·keys[t], for R rows and T tokens.
template <DType dtype, int R, int T>
__attribute__((noinline)) void multiply_keys(const float *queries, int64_t dims, int64_t head_dim,
                                             const char *const *keys, int64_t offset,
                                             Floats *products, int64_t stride) {
  Floats sums[T][R] = {};
  const char *at[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
    at[t] = keys[t] + offset;
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes)
    multiply_some<dtype, R, T, true>(queries, dims, at, d, 2 * kLanes, sums);
  if (d < head_dim)
    multiply_some<dtype, R, T, false>(queries, dims, at, d, head_dim - d, sums);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      products[t * stride + r] = sums[t][r];
}

// sums[r] = sums[r]·keep[r] + Σ weights[t, r]·values[t] for R rows, T tokens and 2·V
// vectors from one dimension on, of which the values have n_numbers.
template <DType dtype, int R, int V, int T, bool scaled>
inline void add_values(float *sums, int64_t dims, const float *keep, const float *weights,
                       int64_t n_lanes, const char *const *values, int64_t offset,
                       int64_t n_numbers) {
  constexpr int64_t step = 2 * kLanes;
  Floats totals[R][2 * V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * V; ++v) {
      totals[r][v] = load(sums + r * dims + v * kLanes);
      if (scaled)
        totals[r][v] *= keep[r];
    }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const char *value = values[t] + offset;
    Floats numbers[2 * V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      load_two<dtype>(value + v * step * kNumberBytes<dtype>,
                      V == 1 ? at_most(n_numbers, step) : step, numbers[2 * v],
                      numbers[2 * v + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float weight = weights[t * n_lanes + r];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * V; ++v)
        totals[r][v] += weight * numbers[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * V; ++v)
      store(sums + r * dims + v * kLanes, totals[r][v]);
}

// Scratch of a task. Rows are those of all its heads; lanes are rows in whole vectors, or in half
// of one: then a vector of scores holds two tokens.
struct FewRows {
  float *queries;   // [rows, dims]
  float *sums;      // [rows, dims]
  float *most;      // [whole vectors of lanes]
  float *total;     // like `most`; the sums of a row's lanes are its total weight
  float *keep;      // like `most`
  float *scores;    // [kStepTokens, lanes]
  Floats *products; // [kMostAtOnce, lanes]
  int64_t dims;     // head_dim in whole pairs of vectors
  int64_t n_lanes;
};

inline FewRows few_rows(Scratch &scratch, int64_t n, int64_t head_dim) {
  int64_t dims = divide_up(head_dim, 2 * kLanes) * 2 * kLanes, n_lanes = whole_vectors(n);
  int64_t in_vectors = n_lanes;
  if (n <= kLanes / 2)
    n_lanes = kLanes / 2;
  int64_t n_floats =
      2 * n * dims + 3 * in_vectors + (kStepTokens + kMostAtOnce * kLanes) * n_lanes;
  float *at = reinterpret_cast<float *>(scratch.take(static_cast<size_t>(n_floats) * 4));
  FewRows rows{};
  rows.dims = dims;
  rows.n_lanes = n_lanes;
  rows.products = reinterpret_cast<Floats *>(at);
  rows.queries = at + kMostAtOnce * kLanes * n_lanes;
  rows.sums = rows.queries + n * dims;
  rows.most = rows.sums + n * dims;
  rows.total = rows.most + in_vectors;
  rows.keep = rows.total + in_vectors;
  rows.scores = rows.keep + in_vectors;
  fill(at, n_floats, 0);
  fill(rows.most, in_vectors, kLowest);
  return rows;
}

// Exchange the orders of numbers in memory and in the vectors of load_two, in a row of `dims`.
template <DType dtype> void to_loaded_order(float *row, int64_t dims) {
  if (dtype != DType::bfloat16)
    return;
  for (int64_t d = 0; d < dims; d += 2 * kLanes) {
    float numbers[2 * kLanes];
    memcpy(numbers, row + d, sizeof numbers);
    for (int i = 0; i < kLanes; ++i) {
      row[d + i] = numbers[2 * i];
      row[d + kLanes + i] = numbers[2 * i + 1];
    }
  }
}

template <DType dtype> void to_memory_order(const float *row, float *to, int64_t n) {
  constexpr bool pairs = dtype == DType::bfloat16;
  for (int64_t d = 0; d < n; ++d)
    to[d] = pairs ? row[d / (2 * kLanes) * 2 * kLanes + d % 2 * kLanes + d % (2 * kLanes) / 2]
                  : row[d];
}

// Rows of a step's keys, its values, and those of the step after it.
typedef const char *StepRows[4 * kStepTokens];

// scores[t, lane] of a step.
template <DType dtype, int T>
void score_step(const Task &task, const FewRows &rows, const char *const *keys, int64_t ahead,
                int64_t head_dim) {
  int64_t n_rows = task.n_rows, dims = rows.dims, head_bytes = head_dim * kNumberBytes<dtype>;
  for (int64_t t = 0; t < kStepTokens; t += T, keys += T) {
    for (int64_t h = 0; h < task.n_heads; ++h) {
      int64_t offset = (task.first_head + h) * head_bytes;
      fetch_ahead(keys + ahead, T, offset, head_bytes);
      const float *queries = rows.queries + h * n_rows * dims;
      Floats *products = rows.products + h * n_rows;
      int64_t r = 0;
      for (; r + 4 <= n_rows; r += 4)
        multiply_keys<dtype, 4, T>(queries + r * dims, dims, head_dim, keys, offset, products + r,
                                   rows.n_lanes);
      for (; r + 2 <= n_rows; r += 2)
        multiply_keys<dtype, 2, T>(queries + r * dims, dims, head_dim, keys, offset, products + r,
                                   rows.n_lanes);
      for (; r < n_rows; ++r)
        multiply_keys<dtype, 1, T>(queries + r * dims, dims, head_dim, keys, offset, products + r,
                                   rows.n_lanes);
    }
    float *scores = rows.scores + t * rows.n_lanes;
    for (int64_t i = 0; i < T * rows.n_lanes; i += kLanes) {
      Floats products[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane)
        products[lane] = rows.products[i + lane];
      store(scores + i, sums_of(products));
    }
  }
}

// Take keys of a step that rows do not see out of their scores; the step has n keys from `at` on.
inline void mask_step(const Plan &plan, const Task &task, const FewRows &rows, int64_t at,
                      int64_t n) {
  const AttentionCall &call = *plan.call;
  int64_t start = call.runs[task.run].start;
  for (int64_t i = 0; i < task.n_heads * task.n_rows; ++i) {
    int64_t position = start + (task.first_row + i % task.n_rows) / plan.n_shared;
    int64_t first = first_key(call, position) - at, end = at_most(position + 1 - at, n);
    for (int64_t t = 0; t < kStepTokens; ++t)
      if (t < first || t >= end)
        rows.scores[t * rows.n_lanes + i] = -__builtin_inff();
  }
}

// Replace scores by weights, and bring the largest scores and total weights up to date.
inline void weigh_step(const FewRows &rows) {
  int64_t stride = at_least(rows.n_lanes, kLanes), n = kStepTokens * rows.n_lanes;
  for (int64_t lane = 0; lane < rows.n_lanes; lane += kLanes) {
    float *scores = rows.scores + lane;
    Floats before = load(rows.most + lane), most = before, total{};
    for (int64_t i = 0; i < n; i += stride)
      most = larger(load(scores + i), most);
    if (rows.n_lanes < kLanes)
      most = larger(most, exchange<kLanes / 2>(most));
    for (int64_t i = 0; i < n; i += stride) {
      Floats weights = power_of_two<false>(load(scores + i) - most);
      total += weights;
      store(scores + i, weights);
    }
    Floats keep = power_of_two<false>(before - most);
    store(rows.keep + lane, keep);
    store(rows.most + lane, most);
    store(rows.total + lane, load(rows.total + lane) * keep + total);
  }
}

template <DType dtype, int R, int T, bool scaled>
inline void add_rows(const FewRows &rows, int64_t head_dim, int64_t row, int64_t t,
                     const char *const *values, int64_t offset) {
  constexpr int64_t step = 2 * kLanes;
  constexpr int V = kLanes == 16 ? (R == 4 ? 2 : 4) : (R == 4 ? 1 : 2);
  const float *weights = rows.scores + t * rows.n_lanes + row;
  for (int64_t d = 0; d < head_dim;) {
    int64_t left = head_dim - d, width = left >= V * step ? V * step : step;
    auto compute = add_values<dtype, R, 1, T, scaled>;
    if (left >= V * step) {
      compute = add_values<dtype, R, V, T, scaled>;
    } else if (V == 4 && left >= 2 * step) {
      compute = add_values<dtype, R, 2, T, scaled>;
      width = 2 * step;
    }
    compute(rows.sums + row * rows.dims + d, rows.dims, rows.keep + row, weights, rows.n_lanes,
            values, offset + d * kNumberBytes<dtype>, left);
    d += width;
  }
}

template <DType dtype, int T, bool scaled>
void add_block(const Task &task, const FewRows &rows, const char *const *values, int64_t t,
               int64_t ahead, int64_t head_dim) {
  int64_t n_rows = task.n_rows, head_bytes = head_dim * kNumberBytes<dtype>;
  for (int64_t h = 0; h < task.n_heads; ++h) {
    int64_t offset = (task.first_head + h) * head_bytes, r = h * n_rows, end = r + n_rows;
    fetch_ahead(values + ahead, T, offset, head_bytes);
    for (; r + 4 <= end; r += 4)
      add_rows<dtype, 4, T, scaled>(rows, head_dim, r, t, values, offset);
    for (; r + 2 <= end; r += 2)
      add_rows<dtype, 2, T, scaled>(rows, head_dim, r, t, values, offset);
    for (; r < end; ++r)
      add_rows<dtype, 1, T, scaled>(rows, head_dim, r, t, values, offset);
  }
}

// Find the keys and values of a step; tokens that it lacks are its last one.
inline void find_step(const Plan &plan, const Task &task, int64_t at, const char **rows) {
  const AttentionCall &call = *plan.call;
  int64_t n = at_most(kStepTokens, task.to - at);
  for (int side = 0; side < 2; ++side, rows += kStepTokens) {
    find_rows(call.pool, call.layer, side, call.runs[task.run].pages, at, n, rows);
    for (int64_t i = n; i < kStepTokens; ++i)
      rows[i] = rows[n - 1];
  }
}

// K: tokens whose keys are read at the same time. V: of values.
template <DType dtype, int K, int V>
void attend_few_at_once(const Plan &plan, const Task &task, Scratch &scratch) {
  const AttentionCall &call = *plan.call;
  int64_t n = task.n_heads * task.n_rows, head_dim = call.pool.head_dim;
  FewRows rows = few_rows(scratch, n, head_dim);
  for (int64_t i = 0; i < n; ++i) {
    float *query = rows.queries + i * rows.dims;
    copy_query(plan, task, task.first_head + i / task.n_rows, task.first_row + i % task.n_rows,
               query_factor(call), query);
    to_loaded_order<dtype>(query, rows.dims);
  }
  int64_t row_bytes = task.n_heads * head_dim * kNumberBytes<dtype>;
  int64_t ahead = at_most(2 * kStepTokens, at_least(V, kFetchBytes / row_bytes));
  int64_t start = call.runs[task.run].start;
  int64_t last = start + (task.first_row + task.n_rows - 1) / plan.n_shared;
  StepRows found;
  find_step(plan, task, task.from, found + 2 * kStepTokens);
  for (int64_t at = task.from; at < task.to; at += kStepTokens) {
    int64_t n_keys = at_most(kStepTokens, task.to - at);
    memcpy(found, found + 2 * kStepTokens, sizeof found / 2);
    if (at + kStepTokens < task.to)
      find_step(plan, task, at + kStepTokens, found + 2 * kStepTokens);
    score_step<dtype, K>(task, rows, found, ahead, head_dim);
    if (call.softcap > 0)
      cap_scores(rows.scores, kStepTokens * rows.n_lanes, call.softcap);
    if (n_keys < kStepTokens || at + n_keys > start + 1 || first_key(call, last) > at)
      mask_step(plan, task, rows, at, n_keys);
    weigh_step(rows);
    const char *const *values = found + kStepTokens;
    add_block<dtype, V, true>(task, rows, values, 0, ahead, head_dim);
    for (int64_t t = V; t < kStepTokens; t += V)
      add_block<dtype, V, false>(task, rows, values + t, t, ahead, head_dim);
  }
  if (rows.n_lanes < kLanes)
    store(rows.total, load(rows.total) + exchange<kLanes / 2>(load(rows.total)));
  float *sums = task.group >= 0 ? partial_of(plan, task) : rows.queries;
  for (int64_t i = 0; i < n; ++i)
    to_memory_order<dtype>(rows.sums + i * rows.dims, sums + i * plan.dims, plan.dims);
  if (task.group >= 0) {
    memcpy(sums + n * plan.dims, rows.most, static_cast<size_t>(n) * 4);
    memcpy(sums + n * (plan.dims + 1), rows.total, static_cast<size_t>(n) * 4);
  }
  end_task(plan, task, sums, rows.most, rows.total);
}

template <DType dtype>
void attend_few(const Plan &plan, const Task &task, Scratch &scratch) {
  int64_t row_bytes = task.n_heads * plan.call->pool.head_dim * kNumberBytes<dtype>;
  // Numbers of two bytes take more instructions a byte. Where registers are few, so are tokens.
  if (kLanes == 16 && row_bytes <= kNarrowBytes)
    attend_few_at_once<dtype, kMostAtOnce, kNumberBytes<dtype> == 2 ? 8 : 4>(plan, task, scratch);
  else
    attend_few_at_once<dtype, kFewAtOnce, kFewAtOnce>(plan, task, scratch);
}

}}} // namespace
