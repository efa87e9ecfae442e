// Cut a batch's attention into tasks, and merge the results of tasks that share rows.
//
// The rows of a run and a head of keys are the queries of its tokens and of the heads that share
// these keys, folded: row = token·n_shared + head. Runs of few rows are computed for several heads
// at once, in chunks of the context (attention_few.inl); runs of many rows for one head and a block
// of rows (attention_many.inl).
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Memory that grows and is kept, aligned to pages.
struct Scratch {
  char *data;
  size_t size;
  char *padding[6]; // a cache line

  char *take(size_t n_bytes) {
    if (n_bytes > size) {
      free(data);
      size = (n_bytes + n_bytes / 4 + 4095) / 4096 * 4096;
      data = static_cast<char *>(aligned_alloc(4096, size));
      if (!data)
        abort();
    }
    return data;
  }
};

// Of each thread of parallel_for, where one task at a time uses it. Kept for the process's life.
alignas(64) Scratch thread_scratch[kMaxThreads];

// Of a caller: tasks, groups and partial results of its call.
struct CallScratch : Scratch {
  ~CallScratch() { free(data); }
};
thread_local CallScratch call_scratch{};

// Rows of some heads against keys from … to-1 of a run.
struct Task {
  float cost; // about nanoseconds
  bool few;
  int32_t first_head, n_heads; // of keys
  int64_t run;
  int64_t first_row, n_rows; // of each head
  int64_t from, to;
  int64_t group; // of the tasks that share these rows; -1: none
  int64_t chunk; // number of the task in its group
};

// Tasks that share rows; the last one to end merges their results.
struct Group {
  int64_t n_chunks;
  int64_t n_left;
  float *partial; // [n_chunks, partial_floats]
};

// A chunk's result: sums [n, dims], largest scores [n] and total weights [n] of n rows.
inline int64_t partial_floats(int64_t n, int64_t dims) { return n * (dims + 2); }

struct Plan {
  const AttentionCall *call;
  int64_t n_shared; // heads that share one of keys
  int64_t dims;     // head_dim in whole vectors
  float target;     // cost of a task that is not cut further
  Task *tasks;      // nullptr: count only
  Group *groups;
  float *partial;
  int64_t n_tasks, n_groups, n_partial;
  float cost;
};

// Runs of up to so many rows a head are computed by attention_few.inl.
constexpr int64_t kFewRows = 16;
// Rows that attention_many.inl multiplies at a time: accumulators fill half of the registers.
#if HALFMOON_LANES == 16 || defined(__aarch64__)
constexpr int64_t kTileRows = 8;
#else
constexpr int64_t kTileRows = 6;
#endif
// Rows of a task of attention_many.inl at most.
constexpr int64_t kBlockRows = 120 / kTileRows * kTileRows;
// A task of fewer nanoseconds costs more to hand out than it gains.
constexpr float kLeastCost = 8000.0f;
// Fewer keys are not worth a merge.
constexpr int64_t kLeastFewKeys = 128, kLeastManyKeys = 512;
// Chunks begin at multiples of it.
constexpr int64_t kChunkStep = 64;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Keys that the query at `position` sees: first_key … position.
inline int64_t first_key(const AttentionCall &call, int64_t position) {
  return call.window > 0 ? at_least(position - call.window + 1, 0) : 0;
}

// Add the tasks of the same rows, `n_chunks` of them.
inline void add_chunks(Plan &plan, Task task, int64_t n_chunks) {
  int64_t from = task.from, to = task.to;
  int64_t step = divide_up(divide_up(to - from, n_chunks), kChunkStep) * kChunkStep;
  int64_t aligned = from / kChunkStep * kChunkStep;
  n_chunks = divide_up(to - aligned, step);
  task.group = -1;
  if (n_chunks > 1) {
    int64_t n_floats = partial_floats(task.n_heads * task.n_rows, plan.dims) * n_chunks;
    if (plan.tasks)
      plan.groups[plan.n_groups] = {n_chunks, n_chunks, plan.partial + plan.n_partial};
    task.group = plan.n_groups++;
    plan.n_partial += n_floats;
  }
  plan.cost += task.cost;
  task.cost /= static_cast<float>(n_chunks);
  for (task.chunk = 0; task.chunk < n_chunks; ++task.chunk) {
    task.from = at_least(from, aligned + task.chunk * step);
    task.to = at_most(to, aligned + (task.chunk + 1) * step);
    if (plan.tasks)
      plan.tasks[plan.n_tasks] = task;
    ++plan.n_tasks;
  }
}

inline void cut_few(Plan &plan, int64_t index, int64_t n_rows) {
  const AttentionCall &call = *plan.call;
  const PoolView &pool = call.pool;
  const RunView &run = call.runs[index];
  int64_t from = first_key(call, run.start), to = run.start + run.n_tokens;
  float cost_a_head = static_cast<float>((to - from) * pool.head_dim) *
                      (static_cast<float>(size_of(pool.dtype)) / 6.0f +
                       0.04f * static_cast<float>(n_rows));
  float pieces = cost_a_head * static_cast<float>(pool.n_kv_heads) / plan.target;
  int64_t n_pieces = pieces > 4096 ? 4096 : static_cast<int64_t>(pieces + 0.99f);
  int64_t most_chunks = divide_up(to - from, kLeastFewKeys);
  int64_t n_chunks = at_least(1, at_most(at_most(n_pieces, 8), most_chunks));
  int64_t n_slices = at_most(pool.n_kv_heads, at_least(1, divide_up(n_pieces, n_chunks)));
  n_chunks = at_least(n_chunks, at_most(divide_up(n_pieces, n_slices), most_chunks));
  for (int64_t slice = 0; slice < n_slices; ++slice) {
    int64_t first = pool.n_kv_heads * slice / n_slices;
    int64_t end = pool.n_kv_heads * (slice + 1) / n_slices;
    add_chunks(plan,
               {cost_a_head * static_cast<float>(end - first), true, static_cast<int32_t>(first),
                static_cast<int32_t>(end - first), index, 0, n_rows, from, to, -1, 0},
               n_chunks);
  }
}

inline void cut_many(Plan &plan, int64_t index, int64_t n_rows) {
  const AttentionCall &call = *plan.call;
  const PoolView &pool = call.pool;
  const RunView &run = call.runs[index];
  int64_t n_blocks = divide_up(n_rows, kBlockRows);
  int64_t a_block = at_most(kBlockRows, divide_up(divide_up(n_rows, n_blocks), kTileRows) * kTileRows);
  for (int64_t first = 0; first < n_rows; first += a_block) {
    int64_t n = at_most(a_block, n_rows - first);
    int64_t from = first_key(call, run.start + first / plan.n_shared);
    int64_t to = run.start + (first + n - 1) / plan.n_shared + 1;
    float cost = static_cast<float>((to - from) * pool.head_dim) *
                 (0.035f * static_cast<float>(n) + 0.3f);
    float pieces = cost / plan.target;
    int64_t n_chunks = pieces > 4096 ? 4096 : static_cast<int64_t>(pieces + 0.99f);
    n_chunks = at_least(1, at_most(n_chunks, (to - from) / kLeastManyKeys));
    for (int32_t head = 0; head < pool.n_kv_heads; ++head)
      add_chunks(plan, {cost, false, head, 1, index, first, n, from, to, -1, 0}, n_chunks);
  }
}

inline void cut_runs(Plan &plan) {
  plan.n_tasks = plan.n_groups = plan.n_partial = 0;
  plan.cost = 0;
  for (int64_t i = 0; i < plan.call->n_runs; ++i) {
    int64_t n_rows = plan.call->runs[i].n_tokens * plan.n_shared;
    if (n_rows <= kFewRows)
      cut_few(plan, i, n_rows);
    else
      cut_many(plan, i, n_rows);
  }
}

inline int compare_costs(const void *a, const void *b) {
  float x = static_cast<const Task *>(a)->cost, y = static_cast<const Task *>(b)->cost;
  return x > y ? -1 : x < y ? 1 : 0;
}

// Cut the call into tasks, the longest first.
inline Plan make_plan(const AttentionCall &call) {
  Plan plan{};
  plan.call = &call;
  plan.n_shared = call.n_heads / call.pool.n_kv_heads;
  plan.dims = whole_vectors(call.pool.head_dim);
  plan.target = 3e38f;
  cut_runs(plan);
  // About four tasks a thread, so that one that loses its core delays little.
  int n_threads = threads();
  if (n_threads > 1 && plan.cost > 2 * kLeastCost) {
    float even = plan.cost / static_cast<float>(4 * n_threads);
    plan.target = even > kLeastCost ? even : kLeastCost;
    cut_runs(plan);
  }
  size_t task_bytes = static_cast<size_t>(plan.n_tasks) * sizeof(Task);
  size_t group_bytes = static_cast<size_t>(plan.n_groups) * sizeof(Group);
  size_t before = (task_bytes + group_bytes + 63) / 64 * 64;
  char *memory = call_scratch.take(before + static_cast<size_t>(plan.n_partial) * sizeof(float));
  plan.tasks = reinterpret_cast<Task *>(memory);
  plan.groups = reinterpret_cast<Group *>(memory + task_bytes);
  plan.partial = reinterpret_cast<float *>(memory + before);
  cut_runs(plan);
  if (plan.n_tasks > 1)
    qsort(plan.tasks, static_cast<size_t>(plan.n_tasks), sizeof(Task), compare_costs);
  return plan;
}

// Where a row's result belongs.
inline float *result_of(const Plan &plan, const Task &task, int64_t head, int64_t row) {
  const AttentionCall &call = *plan.call;
  int64_t token = row / plan.n_shared;
  int64_t query_head = head * plan.n_shared + row % plan.n_shared;
  return call.out + (call.runs[task.run].row_start + token) * call.out_stride +
         query_head * call.pool.head_dim;
}

// Write a row's result: its sums over its total weight, with the sink in the total.
inline void finish_row(const Plan &plan, const Task &task, int64_t head, int64_t row,
                       const float *sums, float most, float total) {
  const AttentionCall &call = *plan.call;
  float factor;
  if (call.sinks) {
    float sink = call.sinks[head * plan.n_shared + row % plan.n_shared] * kLog2E;
    float higher = sink > most ? sink : most;
    float keep = power_of_two(most - higher);
    factor = keep / (total * keep + power_of_two(sink - higher));
  } else {
    factor = 1.0f / total;
  }
  float *out = result_of(plan, task, head, row);
  for (int64_t d = 0; d < call.pool.head_dim; ++d)
    out[d] = sums[d] * factor;
}

// Where a task of a group leaves its sums [n, dims], largest scores [n] and total weights [n].
inline float *partial_of(const Plan &plan, const Task &task) {
  int64_t n = task.n_heads * task.n_rows;
  return plan.groups[task.group].partial + task.chunk * partial_floats(n, plan.dims);
}

// Merge the results of a task's group if it was the last one to end.
inline void end_chunk(const Plan &plan, const Task &task) {
  Group &group = plan.groups[task.group];
  if (__atomic_sub_fetch(&group.n_left, 1, __ATOMIC_ACQ_REL) != 0)
    return;
  int64_t n = task.n_heads * task.n_rows, dims = plan.dims, step = partial_floats(n, dims);
  for (int64_t i = 0; i < n; ++i) {
    float *sums = group.partial + i * dims;
    const float *mosts = group.partial + n * dims + i, *totals = mosts + n;
    float most = kLowest, total = 0;
    for (int64_t c = 0; c < group.n_chunks; ++c)
      most = mosts[c * step] > most ? mosts[c * step] : most;
    for (int64_t c = 0; c < group.n_chunks; ++c) {
      float keep = power_of_two(mosts[c * step] - most);
      total += keep * totals[c * step];
      const float *from = sums + c * step;
      for (int64_t d = 0; d < dims; d += kLanes)
        store(sums + d, (c == 0 ? Floats{} : load(sums + d)) + keep * load(from + d));
    }
    finish_row(plan, task, task.first_head + i / task.n_rows, task.first_row + i % task.n_rows,
               sums, most, total);
  }
}

// Find the numbers of n positions in one side of a layer.
inline void find_rows(const PoolView &pool, int32_t layer, int side, const int32_t *pages,
                      int64_t position, int64_t n, const char **rows) {
  int64_t row_bytes = pool.width() * static_cast<int64_t>(size_of(pool.dtype));
  int64_t page = position / pool.block_size, slot = position % pool.block_size;
  const char *row = nullptr;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || slot == pool.block_size) {
      if (i > 0) {
        ++page;
        slot = 0;
      }
      row = pool.rows(pages[page], layer, side) + slot * row_bytes;
    }
    rows[i] = row;
    row += row_bytes;
    ++slot;
  }
}

// Copy a head's query times `factor`, filled with zeros to whole vectors.
inline void copy_query(const Plan &plan, const Task &task, int64_t head, int64_t row, float factor,
                       float *to) {
  const AttentionCall &call = *plan.call;
  int64_t head_dim = call.pool.head_dim;
  const float *from = call.queries +
                      (call.runs[task.run].row_start + row / plan.n_shared) * call.query_stride +
                      (head * plan.n_shared + row % plan.n_shared) * head_dim;
  int64_t d = 0;
  for (; d < head_dim; ++d)
    to[d] = from[d] * factor;
  for (; d < plan.dims; ++d)
    to[d] = 0;
}

// Write the rows of a task without a group, or leave them to its group.
inline void end_task(const Plan &plan, const Task &task, const float *sums, const float *most,
                     const float *total) {
  if (task.group >= 0) {
    end_chunk(plan, task);
    return;
  }
  for (int64_t i = 0; i < task.n_heads * task.n_rows; ++i)
    finish_row(plan, task, task.first_head + i / task.n_rows, task.first_row + i % task.n_rows,
               sums + i * plan.dims, most[i], total[i]);
}

}}} // namespace
