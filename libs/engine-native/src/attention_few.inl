// Attention of runs with few rows a head: decode, and a few tokens after a cached prefix. Bound by
// memory: keys and values are read once, in the order of the pages, for all heads of the task.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Keys of one step. Their scores and values stay in the first-level cache.
constexpr int64_t kTile = 64;
constexpr int64_t kCacheLine = 64;
// Steps of many heads have fewer keys: all heads' rows of one step are fetched during another.
constexpr int64_t kLeastStep = 16, kStepBytes = 192 * 1024;

inline void prefetch_row(const char *row, int64_t n_bytes) {
  for (int64_t b = 0; b < n_bytes; b += kCacheLine)
    __builtin_prefetch(row + b, 0, 3);
}

// scores[r, i] = queries[r]·keys[i] of R rows and n keys; a row has kTile scores. n_vectors: whole
// vectors of a head, where the compiler shall know them, or 0. `ahead`: rows to be read next.
template <DType dtype, int R, int n_vectors>
void score_keys(const float *queries, int64_t dims, int64_t head_dim, const char *const *keys,
                int64_t offset, int64_t n, const char *const *ahead, float *scores) {
  constexpr int n_together = kLanes / R;
  constexpr int64_t size = kNumberBytes<dtype>;
  int64_t whole = n_vectors > 0 ? n_vectors * kLanes : head_dim / kLanes * kLanes;
  for (int64_t i = 0; i < n; i += n_together) {
    Floats products[kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < n_together; ++t) {
      int64_t index = i + t < n ? i + t : n - 1;
      const char *key = keys[index] + offset;
      if (ahead)
        prefetch_row(ahead[index], head_dim * size);
      Floats sums[R] = {};
#pragma GCC unroll 8
      for (int64_t d = 0; d < whole; d += kLanes) {
        Floats numbers = load_numbers<dtype>(key + d * size);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sums[r] += load(queries + r * dims + d) * numbers;
      }
      if (n_vectors == 0 && whole < head_dim) {
        Floats numbers = load_numbers<dtype>(key + whole * size, head_dim - whole);
        for (int r = 0; r < R; ++r)
          sums[r] += load(queries + r * dims + whole) * numbers;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        products[r * n_together + t] = sums[r];
    }
    Floats found = sums_of(products);
    float numbers[kLanes];
    store(numbers, found);
    for (int r = 0; r < R; ++r)
      memcpy(scores + r * kTile + i, numbers + r * n_together, sizeof(float) * n_together);
  }
}

// sums[r] = sums[r]·keep[r] + Σ weights[r, i]·values[i], V vectors from dimension d on. The last
// one has `n_last` numbers.
template <DType dtype, int R, int V, bool partly>
void add_values(float *sums, int64_t dims, const float *keep, const float *weights,
                const char *const *values, int64_t offset, int64_t n, int64_t n_last,
                const char *const *ahead, int64_t ahead_bytes) {
  constexpr int64_t size = kNumberBytes<dtype>;
  Floats totals[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      totals[r][v] = load(sums + r * dims + v * kLanes) * keep[r];
  for (int64_t i = 0; i < n; ++i) {
    const char *value = values[i] + offset;
    if (ahead)
      prefetch_row(ahead[i], ahead_bytes);
    Floats numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      numbers[v] = partly && v == V - 1 ? load_numbers<dtype>(value + v * kLanes * size, n_last)
                                        : load_numbers<dtype>(value + v * kLanes * size);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float weight = weights[r * kTile + i];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        totals[r][v] += weight * numbers[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      store(sums + r * dims + v * kLanes, totals[r][v]);
}

// What a step of a task computes with: one tile of one head.
struct TileStep {
  const char *const *keys, *const *values, *const *keys_ahead, *const *values_ahead;
  int64_t offset; // of the head in a row of the pool
  int64_t n;
  int64_t dims, head_dim;
};

template <DType dtype, int R>
void score_rows(const TileStep &step, const float *queries, bool prefetch, float *scores) {
  auto compute = step.head_dim == 4 * kLanes    ? score_keys<dtype, R, 4>
                 : step.head_dim == 8 * kLanes  ? score_keys<dtype, R, 8>
                                                : score_keys<dtype, R, 0>;
  compute(queries, step.dims, step.head_dim, step.keys, step.offset, step.n,
          prefetch ? step.keys_ahead : nullptr, scores);
}

template <DType dtype, int R>
void add_rows(const TileStep &step, float *sums, const float *keep, const float *weights,
              bool prefetch) {
  constexpr int V = kLanes == 16 ? (R == 1 ? 8 : 4) : (R == 4 ? 2 : 4);
  constexpr int64_t size = kNumberBytes<dtype>;
  for (int64_t d = 0; d < step.head_dim;) {
    int64_t left = step.head_dim - d;
    auto compute = left >= V * kLanes ? add_values<dtype, R, V, false>
                   : left >= kLanes   ? add_values<dtype, R, 1, false>
                                      : add_values<dtype, R, 1, true>;
    compute(sums + d, step.dims, keep, weights, step.values, step.offset + d * size, step.n, left,
            prefetch && d == 0 ? step.values_ahead : nullptr, step.head_dim * size);
    d += left >= V * kLanes ? V * kLanes : kLanes;
  }
}

// Take keys that a row does not see out of its scores.
inline void mask_scores(float *scores, int64_t n, int64_t first, int64_t end) {
  fill(scores, at_most(at_least(first, 0), n), -__builtin_inff());
  end = at_most(at_least(end, 0), n);
  fill(scores + end, n - end, -__builtin_inff());
}

template <DType dtype>
void attend_few(const Plan &plan, const Task &task, Scratch &scratch) {
  const AttentionCall &call = *plan.call;
  const PoolView &pool = call.pool;
  const RunView &run = call.runs[task.run];
  int64_t dims = plan.dims, n_rows = task.n_rows, n = task.n_heads * n_rows;
  float *queries = reinterpret_cast<float *>(scratch.take(
      static_cast<size_t>(2 * n * dims + 2 * n + n_rows * (kTile + 1)) * sizeof(float)));
  float *scores = queries + n * dims, *keep = scores + n_rows * kTile;
  float *sums = task.group >= 0 ? partial_of(plan, task) : keep + n_rows;
  float *most = sums + n * dims, *total = most + n;
  for (int64_t i = 0; i < n; ++i) {
    copy_query(plan, task, task.first_head + i / n_rows, task.first_row + i % n_rows,
               query_factor(call), queries + i * dims);
    most[i] = kLowest;
    total[i] = 0;
  }
  fill(sums, n * dims, 0);

  // Whole rows of a step, of both sides, shall fit in a part of the second-level cache.
  int64_t head_bytes = pool.head_dim * kNumberBytes<dtype>;
  int64_t n_step = at_least(kLeastStep, kStepBytes / (2 * task.n_heads * head_bytes));
  n_step = at_most(kTile, n_step / kLeastStep * kLeastStep);
  const char *rows[4][kTile], *ahead[2][kTile];
  int now = 0;
  int64_t first_offset = task.first_head * head_bytes;
  auto find = [&](int64_t at, int which) {
    int64_t n_keys = at_most(n_step, task.to - at);
    for (int side = 0; side < 2; ++side) {
      const char **found = rows[2 * which + side];
      find_rows(pool, call.layer, side, run.pages, at, n_keys, found);
      for (int64_t i = n_keys; i < n_step; ++i)
        found[i] = found[n_keys - 1];
    }
  };
  find(task.from, 0);
  int64_t last_token = run.start + (task.first_row + n_rows - 1) / plan.n_shared;
  for (int64_t at = task.from; at < task.to; at += n_step, now = 1 - now) {
    bool more = at + n_step < task.to;
    if (more)
      find(at + n_step, 1 - now);
    TileStep step{rows[2 * now], rows[2 * now + 1], more ? ahead[0] : nullptr,
                  more ? ahead[1] : nullptr, 0, at_most(n_step, task.to - at), dims,
                  pool.head_dim};
    int64_t n_scores = whole_vectors(step.n);
    bool masked = at + step.n > run.start + 1 || first_key(call, last_token) > at;
    int64_t next_row = 0, next_head = 0;
    for (int64_t h = 0; h < task.n_heads; ++h) {
      step.offset = (task.first_head + h) * head_bytes;
      // Meanwhile the next step's rows are fetched in the order of memory, an equal part a head.
      for (int64_t i = 0; more && i < n_step; ++i) {
        for (int side = 0; side < 2; ++side)
          ahead[side][i] =
              rows[2 * (1 - now) + side][next_row] + first_offset + next_head * head_bytes;
        if (++next_head == task.n_heads) {
          next_head = 0;
          ++next_row;
        }
      }
      const float *q = queries + h * n_rows * dims;
      int64_t r = 0;
      for (; r + 4 <= n_rows; r += 4)
        score_rows<dtype, 4>(step, q + r * dims, r == 0, scores + r * kTile);
      for (; r + 2 <= n_rows; r += 2)
        score_rows<dtype, 2>(step, q + r * dims, r == 0, scores + r * kTile);
      for (; r < n_rows; ++r)
        score_rows<dtype, 1>(step, q + r * dims, r == 0, scores + r * kTile);
      for (r = 0; r < n_rows; ++r) {
        float *row = scores + r * kTile;
        if (call.softcap > 0)
          cap_scores(row, n_scores, call.softcap);
        if (masked) {
          int64_t position = run.start + (task.first_row + r) / plan.n_shared;
          mask_scores(row, n_scores, first_key(call, position) - at, position + 1 - at);
        }
        fill(row + step.n, n_scores - step.n, -__builtin_inff());
        keep[r] = weigh_scores<false>(row, n_scores, most[h * n_rows + r], total[h * n_rows + r]);
      }
      float *to = sums + h * n_rows * dims;
      r = 0;
      for (; r + 4 <= n_rows; r += 4)
        add_rows<dtype, 4>(step, to + r * dims, keep + r, scores + r * kTile, r == 0);
      for (; r + 2 <= n_rows; r += 2)
        add_rows<dtype, 2>(step, to + r * dims, keep + r, scores + r * kTile, r == 0);
      for (; r < n_rows; ++r)
        add_rows<dtype, 1>(step, to + r * dims, keep + r, scores + r * kTile, r == 0);
    }
  }
  end_task(plan, task, sums, most, total);
}

}}} // namespace
