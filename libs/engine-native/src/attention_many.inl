// Attention of runs with many rows a head: blocks of rows against blocks of keys, which are packed
// once for all rows of the task. Bound by arithmetic: both products run in registers.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Columns of the packed operands: keys of the first product, dimensions of the second.
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kMostKeys = 512;

// Keys of one step: packed keys and values fill half of a second-level cache of 512 KiB.
inline int64_t keys_of_step(int64_t dims) {
  int64_t n = 32768 / dims / kPanel * kPanel;
  return at_most(kMostKeys, at_least(kPanel, n));
}

// sums[r, v] += Σ a[r, i]·b[i, v] over i < n: rows of `a` are `stride` apart, those of b a panel.
template <int V>
inline __attribute__((always_inline)) void multiply(const float *a, int64_t stride, const float *b,
                                                    int64_t n, Floats (&sums)[kTileRows][V]) {
  for (int64_t i = 0; i < n; ++i) {
    Floats columns[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      columns[v] = load(b + i * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
        sums[r][v] += a[r * stride + i] * columns[v];
  }
}

// scores[r, 0 … kPanel-1] = queries[r]·keys
inline void score_panel(const float *queries, int64_t dims, const float *keys, int64_t head_dim,
                        float *scores) {
  Floats sums[kTileRows][2] = {};
  multiply<2>(queries, dims, keys, head_dim, sums);
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      store(scores + r * kMostKeys + v * kLanes, sums[r][v]);
}

// sums[r] = sums[r]·keep[r] + weights[r]·values, V vectors wide.
template <int V>
inline void add_panel(float *sums, int64_t dims, const float *keep, const float *weights,
                      const float *values, int64_t n) {
  Floats totals[kTileRows][V];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      totals[r][v] = load(sums + r * dims + v * kLanes) * keep[r];
  multiply<V>(weights, kMostKeys, values, n, totals);
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      store(sums + r * dims + v * kLanes, totals[r][v]);
}

// Pack n keys as [panel][dimension][kPanel keys]; keys that the last panel lacks are zeros.
template <DType dtype>
void pack_keys(const char *const *rows, int64_t offset, int64_t n, int64_t head_dim, float *to) {
  constexpr int64_t size = kNumberBytes<dtype>;
  for (int64_t i = 0; i < divide_up(n, kPanel) * kPanel; i += kLanes) {
    float *panel = to + i / kPanel * kPanel * head_dim + i % kPanel;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      int64_t left = head_dim - d;
      Floats block[kLanes];
      if (left >= kLanes && i + kLanes <= n) {
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t)
          block[t] = load_numbers<dtype>(rows[i + t] + offset + d * size);
      } else {
        for (int t = 0; t < kLanes; ++t) {
          if (i + t >= n)
            block[t] = Floats{};
          else if (left >= kLanes)
            block[t] = load_numbers<dtype>(rows[i + t] + offset + d * size);
          else
            block[t] = load_numbers<dtype>(rows[i + t] + offset + d * size, left);
        }
      }
      transpose(block);
      if (left >= kLanes) {
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t)
          store(panel + (d + t) * kPanel, block[t]);
      } else {
        for (int t = 0; t < left; ++t)
          store(panel + (d + t) * kPanel, block[t]);
      }
    }
  }
}

// Pack n values as [panel][key][kPanel dimensions], panels `panel_floats` apart.
template <DType dtype>
void pack_values(const char *const *rows, int64_t offset, int64_t n, int64_t head_dim,
                 int64_t panel_floats, float *to) {
  constexpr int64_t size = kNumberBytes<dtype>;
  for (int64_t i = 0; i < n; ++i) {
    const char *row = rows[i] + offset;
    float *at = to + i * kPanel;
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes)
      store(at + d / kPanel * panel_floats + d % kPanel, load_numbers<dtype>(row + d * size));
    if (d < head_dim)
      store(at + d / kPanel * panel_floats + d % kPanel,
            load_numbers<dtype>(row + d * size, head_dim - d));
  }
}

// Scratch of a task.
struct ManyRows {
  float *queries; // [rows, dims]
  float *sums;    // [rows, dims]
  float *most;    // [rows]
  float *total;   // [rows]
  float *scores;  // [kTileRows, kMostKeys]
  float *keys, *values;
  int64_t n_keys; // of a step
};

inline ManyRows many_rows(Scratch &scratch, int64_t n_rows, int64_t dims) {
  int64_t rows = divide_up(n_rows, kTileRows) * kTileRows;
  int64_t n_keys = keys_of_step(dims), packed = n_keys * divide_up(dims, kPanel) * kPanel;
  int64_t n_floats[] = {rows * dims, rows * dims, rows, rows, kTileRows * kMostKeys, packed,
                        packed};
  float *at[7];
  int64_t total = 0;
  for (int64_t n : n_floats)
    total += whole_vectors(n) + kPanel;
  float *memory = reinterpret_cast<float *>(scratch.take(static_cast<size_t>(total) * 4));
  for (int i = 0; i < 7; ++i) {
    at[i] = memory;
    memory += divide_up(n_floats[i], 16) * 16;
  }
  return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], n_keys};
}

// Bring kTileRows rows from `first` on up to date with the packed keys at … at+n-1.
inline void attend_tile(const Plan &plan, const Task &task, const ManyRows &rows, int64_t first,
                        int64_t at, int64_t n) {
  const AttentionCall &call = *plan.call;
  int64_t dims = plan.dims, head_dim = call.pool.head_dim, start = call.runs[task.run].start;
  int64_t n_valid = at_most(kTileRows, task.n_rows - first);
  int64_t low = start + (task.first_row + first) / plan.n_shared;
  int64_t high = start + (task.first_row + first + n_valid - 1) / plan.n_shared;
  // Keys that some row sees, in whole panels.
  int64_t begin = at_least(first_key(call, low) - at, 0) / kPanel * kPanel;
  int64_t end = at_most(high + 1 - at, n);
  if (begin >= end)
    return;
  int64_t padded = divide_up(end, kPanel) * kPanel;
  const float *queries = rows.queries + first * dims;
  for (int64_t i = begin; i < padded; i += kPanel)
    score_panel(queries, dims, rows.keys + i * head_dim, head_dim, rows.scores + i);
  bool masked = padded > low + 1 - at || padded > n || first_key(call, high) > at + begin;
  float keep[kTileRows];
  for (int64_t r = 0; r < n_valid; ++r) {
    float *scores = rows.scores + r * kMostKeys + begin;
    int64_t n_scores = padded - begin;
    if (call.softcap > 0)
      cap_scores(scores, n_scores, call.softcap);
    if (masked) {
      int64_t position = start + (task.first_row + first + r) / plan.n_shared, from = at + begin;
      mask_scores(scores, n_scores, first_key(call, position) - from,
                  at_most(position + 1, at + n) - from);
    }
    keep[r] = weigh_scores<false>(scores, n_scores, rows.most[first + r], rows.total[first + r]);
  }
  for (int64_t r = n_valid; r < kTileRows; ++r)
    keep[r] = 1;
  int64_t panel_floats = rows.n_keys * kPanel;
  float *sums = rows.sums + first * dims;
  const float *weights = rows.scores + begin;
  int64_t d = 0;
  for (; d + kPanel <= dims; d += kPanel)
    add_panel<2>(sums + d, dims, keep, weights,
                 rows.values + d / kPanel * panel_floats + begin * kPanel, end - begin);
  if (d < dims)
    add_panel<1>(sums + d, dims, keep, weights,
                 rows.values + d / kPanel * panel_floats + begin * kPanel, end - begin);
}

template <DType dtype>
void attend_many(const Plan &plan, const Task &task, Scratch &scratch) {
  const AttentionCall &call = *plan.call;
  const PoolView &pool = call.pool;
  const RunView &run = call.runs[task.run];
  int64_t dims = plan.dims, n_rows = task.n_rows;
  int64_t offset = task.first_head * pool.head_dim * kNumberBytes<dtype>;
  ManyRows rows = many_rows(scratch, n_rows, dims);
  int64_t n_padded = divide_up(n_rows, kTileRows) * kTileRows;
  for (int64_t r = 0; r < n_rows; ++r)
    copy_query(plan, task, task.first_head, task.first_row + r, query_factor(call),
               rows.queries + r * dims);
  fill(rows.queries + n_rows * dims, (n_padded - n_rows) * dims, 0);
  fill(rows.sums, n_padded * dims, 0);
  fill(rows.most, n_padded, kLowest);
  fill(rows.total, n_padded, 0);
  const char *found[kMostKeys];
  for (int64_t at = task.from; at < task.to; at += rows.n_keys) {
    int64_t n = at_most(rows.n_keys, task.to - at);
    find_rows(pool, call.layer, 0, run.pages, at, n, found);
    pack_keys<dtype>(found, offset, n, pool.head_dim, rows.keys);
    find_rows(pool, call.layer, 1, run.pages, at, n, found);
    pack_values<dtype>(found, offset, n, pool.head_dim, rows.n_keys * kPanel, rows.values);
    for (int64_t first = 0; first < n_rows; first += kTileRows)
      attend_tile(plan, task, rows, first, at, n);
  }
  if (task.group >= 0) {
    float *partial = partial_of(plan, task);
    memcpy(partial, rows.sums, static_cast<size_t>(n_rows * dims) * 4);
    memcpy(partial + n_rows * dims, rows.most, static_cast<size_t>(n_rows) * 4);
    memcpy(partial + n_rows * (dims + 1), rows.total, static_cast<size_t>(n_rows) * 4);
  }
  end_task(plan, task, rows.sums, rows.most, rows.total);
}

}}} // namespace
