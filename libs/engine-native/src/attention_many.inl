// Attention of runs with many rows a head: blocks of rows against blocks of keys, which are packed
// once for all rows of the task. Bound by arithmetic: both products run in registers.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Columns of the packed operands: keys of the first product, dimensions of the second.
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kMostKeys = 512;

// Numbers of an operand's 32-bit word: one float, or a pair of bfloat16.
template <bool pairs> constexpr int64_t kInWord = pairs ? 2 : 1;

// Keys of one step: packed keys and values fill half of a second-level cache of 512 KiB.
template <bool pairs> inline int64_t keys_of_step(int64_t dims) {
  int64_t n = kInWord<pairs> * 32768 / dims / kPanel * kPanel;
  return at_most(kMostKeys, at_least(kPanel, n));
}

// sums + a·columns, where a word is one number or a pair.
template <bool pairs>
inline __attribute__((always_inline)) Floats add_product(Floats sums, float a, Floats columns) {
#if HALFMOON_PAIRS
  if constexpr (pairs)
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(_mm512_set1_ps(a)),
        reinterpret_cast<__m512bh>(columns)));
#endif
  return sums + a * columns;
}

// sums[r, v] += Σ a[r, i]·b[i, v] over i < n words: rows of `a` are `stride` apart, those of b a
// panel.
template <bool pairs, int V>
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
        sums[r][v] = add_product<pairs>(sums[r][v], a[r * stride + i], columns[v]);
  }
}

// scores[r, 0 … kPanel-1] = queries[r]·keys
template <bool pairs>
inline void score_panel(const float *queries, int64_t stride, const float *keys, int64_t n_words,
                        float *scores) {
  Floats sums[kTileRows][2] = {};
  multiply<pairs, 2>(queries, stride, keys, n_words, sums);
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      store(scores + r * kMostKeys + v * kLanes, sums[r][v]);
}

// sums[r] = sums[r]·keep[r] + weights[r]·values, V vectors wide.
template <bool pairs, int V>
inline void add_panel(float *sums, int64_t dims, const float *keep, const float *weights,
                      const float *values, int64_t n_words) {
  Floats totals[kTileRows][V];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      totals[r][v] = load(sums + r * dims + v * kLanes) * keep[r];
  multiply<pairs, V>(weights, kMostKeys, values, n_words, totals);
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

#if HALFMOON_PAIRS
// Load 32 bfloat16 numbers as 16 words, or the first n < 32 and zeros.
inline Floats load_pairs(const char *p, int64_t n) {
  __mmask32 mask = n >= 32 ? 0xffffffffu : (1u << n) - 1;
  return reinterpret_cast<Floats>(_mm512_maskz_loadu_epi16(mask, p));
}

// Pack n keys as [panel][pair of dimensions][kPanel keys].
inline void pack_key_pairs(const char *const *rows, int64_t offset, int64_t n, int64_t head_dim,
                           float *to) {
  int64_t n_words = divide_up(head_dim, 2);
  for (int64_t i = 0; i < divide_up(n, kPanel) * kPanel; i += kLanes) {
    float *panel = to + i / kPanel * kPanel * n_words + i % kPanel;
    for (int64_t w = 0; w < n_words; w += kLanes) {
      Floats block[kLanes];
      if (i + kLanes <= n) {
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t)
          block[t] = load_pairs(rows[i + t] + offset + w * 4, head_dim - 2 * w);
      } else {
        for (int t = 0; t < kLanes; ++t)
          block[t] = i + t < n ? load_pairs(rows[i + t] + offset + w * 4, head_dim - 2 * w)
                               : Floats{};
      }
      transpose(block);
      if (w + kLanes <= n_words) {
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t)
          store(panel + (w + t) * kPanel, block[t]);
      } else {
        for (int t = 0; t < n_words - w; ++t)
          store(panel + (w + t) * kPanel, block[t]);
      }
    }
  }
}

// Pack n values as [panel][pair of keys][kPanel dimensions]; a last odd key is paired with zeros.
inline void pack_value_pairs(const char *const *rows, int64_t offset, int64_t n, int64_t head_dim,
                             int64_t panel_floats, float *to) {
  static const uint16_t low_order[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                         37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                         11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i low = _mm512_loadu_si512(low_order);
  __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < n; i += 2) {
    float *at = to + i / 2 * kPanel;
    for (int64_t d = 0; d < head_dim; d += kPanel, at += panel_floats) {
      __m512i first =
          reinterpret_cast<__m512i>(load_pairs(rows[i] + offset + d * 2, head_dim - d));
      __m512i second = i + 1 < n ? reinterpret_cast<__m512i>(
                                       load_pairs(rows[i + 1] + offset + d * 2, head_dim - d))
                                 : _mm512_setzero_si512();
      _mm512_storeu_si512(at, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(at + kLanes, _mm512_permutex2var_epi16(first, high, second));
    }
  }
}
#endif

// Scratch of a task.
struct ManyRows {
  float *queries; // [rows, query_words]
  float *sums;    // [rows, dims]
  float *most;    // [rows]
  float *total;   // [rows]
  float *scores;  // [kTileRows, kMostKeys]
  float *keys, *values;
  int64_t n_keys;      // of a step
  int64_t query_words; // of a row of queries
  int64_t head_words;  // of them, those of a head
  int64_t value_panel; // words of a panel of values
};

template <bool pairs>
inline ManyRows many_rows(Scratch &scratch, int64_t n_rows, int64_t head_dim, int64_t dims) {
  constexpr int64_t a_word = kInWord<pairs>;
  int64_t rows = divide_up(n_rows, kTileRows) * kTileRows;
  int64_t n_keys = keys_of_step<pairs>(dims);
  int64_t packed = n_keys * divide_up(dims, kPanel) * kPanel / a_word;
  int64_t n_floats[] = {rows * dims / a_word, rows * dims, rows, rows, kTileRows * kMostKeys,
                        packed, packed};
  float *at[7];
  int64_t total = 0;
  for (int64_t n : n_floats)
    total += divide_up(n, 16) * 16;
  float *memory = reinterpret_cast<float *>(scratch.take(static_cast<size_t>(total) * 4));
  for (int i = 0; i < 7; ++i) {
    at[i] = memory;
    memory += divide_up(n_floats[i], 16) * 16;
  }
  return {at[0], at[1], at[2],         at[3], at[4], at[5], at[6],
          n_keys, dims / a_word, divide_up(head_dim, a_word), n_keys / a_word * kPanel};
}

// Take keys that a row does not see out of its scores.
inline void mask_scores(float *scores, int64_t n, int64_t first, int64_t end) {
  fill(scores, at_most(at_least(first, 0), n), -__builtin_inff());
  end = at_most(at_least(end, 0), n);
  fill(scores + end, n - end, -__builtin_inff());
}

// Bring kTileRows rows from `first` on up to date with the packed keys at … at+n-1.
template <bool pairs>
inline void attend_tile(const Plan &plan, const Task &task, const ManyRows &rows, int64_t first,
                        int64_t at, int64_t n) {
  constexpr int64_t a_word = kInWord<pairs>;
  const AttentionCall &call = *plan.call;
  int64_t dims = plan.dims, start = call.runs[task.run].start;
  int64_t n_valid = at_most(kTileRows, task.n_rows - first);
  int64_t low = start + (task.first_row + first) / plan.n_shared;
  int64_t high = start + (task.first_row + first + n_valid - 1) / plan.n_shared;
  // Keys that some row sees, in whole panels.
  int64_t begin = at_least(first_key(call, low) - at, 0) / kPanel * kPanel;
  int64_t end = at_most(high + 1 - at, n);
  if (begin >= end)
    return;
  int64_t padded = divide_up(end, kPanel) * kPanel;
  const float *queries = rows.queries + first * rows.query_words;
  for (int64_t i = begin; i < padded; i += kPanel)
    score_panel<pairs>(queries, rows.query_words, rows.keys + i * rows.head_words, rows.head_words,
                       rows.scores + i);
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
    keep[r] = weigh_scores<pairs>(scores, n_scores, rows.most[first + r], rows.total[first + r]);
  }
  for (int64_t r = n_valid; r < kTileRows; ++r)
    keep[r] = 1;
  float *sums = rows.sums + first * dims;
  const float *weights = rows.scores + begin;
  const float *values = rows.values + begin / a_word * kPanel;
  int64_t n_words = divide_up(end - begin, a_word), d = 0;
  for (; d + kPanel <= dims; d += kPanel, values += rows.value_panel)
    add_panel<pairs, 2>(sums + d, dims, keep, weights, values, n_words);
  if (d < dims)
    add_panel<pairs, 1>(sums + d, dims, keep, weights, values, n_words);
}

template <DType dtype, bool pairs>
void pack_step(const PoolView &pool, int32_t layer, const int32_t *pages, int64_t offset,
               int64_t at, int64_t n, const ManyRows &rows) {
  const char *found[kMostKeys];
  find_rows(pool, layer, 0, pages, at, n, found);
#if HALFMOON_PAIRS
  if constexpr (pairs)
    pack_key_pairs(found, offset, n, pool.head_dim, rows.keys);
#endif
  if constexpr (!pairs)
    pack_keys<dtype>(found, offset, n, pool.head_dim, rows.keys);
  find_rows(pool, layer, 1, pages, at, n, found);
#if HALFMOON_PAIRS
  if constexpr (pairs)
    pack_value_pairs(found, offset, n, pool.head_dim, rows.value_panel, rows.values);
#endif
  if constexpr (!pairs)
    pack_values<dtype>(found, offset, n, pool.head_dim, rows.value_panel, rows.values);
}

// Copy the task's queries, scaled; those that the last tile lacks are zeros.
template <bool pairs>
void copy_queries(const Plan &plan, const Task &task, const ManyRows &rows) {
  int64_t n_padded = divide_up(task.n_rows, kTileRows) * kTileRows;
  fill(rows.queries, n_padded * rows.query_words, 0);
  float factor = query_factor(*plan.call);
  for (int64_t r = 0; r < task.n_rows; ++r) {
    // The row of sums holds the floats until they are rounded.
    float *query = pairs ? rows.sums : rows.queries + r * rows.query_words;
    copy_query(plan, task, task.first_head, task.first_row + r, factor, query);
    if (pairs)
      from_float(query, rows.queries + r * rows.query_words, DType::bfloat16, plan.dims);
  }
}

template <DType dtype>
void attend_many(const Plan &plan, const Task &task, Scratch &scratch) {
  constexpr bool pairs = HALFMOON_PAIRS && dtype == DType::bfloat16;
  const AttentionCall &call = *plan.call;
  const PoolView &pool = call.pool;
  int64_t dims = plan.dims, n_rows = task.n_rows;
  int64_t offset = task.first_head * pool.head_dim * kNumberBytes<dtype>;
  ManyRows rows = many_rows<pairs>(scratch, n_rows, pool.head_dim, dims);
  copy_queries<pairs>(plan, task, rows);
  int64_t n_padded = divide_up(n_rows, kTileRows) * kTileRows;
  fill(rows.sums, n_padded * dims, 0);
  fill(rows.most, n_padded, kLowest);
  fill(rows.total, n_padded, 0);
  for (int64_t at = task.from; at < task.to; at += rows.n_keys) {
    int64_t n = at_most(rows.n_keys, task.to - at);
    pack_step<dtype, pairs>(pool, call.layer, call.runs[task.run].pages, offset, at, n, rows);
    for (int64_t first = 0; first < n_rows; first += kTileRows)
      attend_tile<pairs>(plan, task, rows, first, at, n);
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
