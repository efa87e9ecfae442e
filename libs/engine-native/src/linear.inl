// Packed linears: cut a call into tasks, and run the kernels of linear_kernel.inl in them.
//
// Few rows: a task takes some panels, each one stream from memory, and all rows; x is prepared once.
// Many rows: a task takes a block of rows and a group of panels. A thread prepares the rows in its
// second-level cache and keeps them for its next tasks of the same block. Each part of a panel comes into the first-level cache once and is multiplied by all rows.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

constexpr int64_t kSharedRows = 256; // x is prepared once for all tasks up to here
constexpr int64_t kTaskBytes = 512 << 10; // prepared rows of a task: half of a second-level cache
constexpr int kTasksOfThread = 64; // small ones, so that all threads end together
constexpr int64_t kFusedRows = 2 * kGroupRows; // from here on 16-bit weights are widened first

struct LinearJob {
  const LinearCall *call;
  const Packed *w;
  const BlockKernel *kernels;
  int64_t block_inputs; // inputs of a block
  int64_t step_inputs;  // inputs that a kernel's step takes
  int64_t step_bytes;
  bool rounds;           // x to bfloat16
  bool widens;           // a panel's part to float32
  const uint32_t *ready; // x prepared for all tasks: [n_blocks][n_rows][kRowWords]; or nullptr
  uint64_t number = 0; // of a job without `ready`, from 1 on
  int64_t n_blocks() const { return (w->n_in + block_inputs - 1) / block_inputs; }
};

LinearJob plan_job(const LinearCall &call) {
  const Packed &w = *of(call.weights);
  LinearJob job{&call, &w, nullptr, kBlockWords, 1, kPanelOutputs * 4, false, false, nullptr};
  switch (w.dtype) {
  case DType::float32:
    job.kernels = kernels_of<Float32Weights>();
    return job;
  case DType::bfloat16:
    job.step_inputs = 2;
#ifdef HALFMOON_BF16_DOT
    job.kernels = kernels_of<DotWeights>();
    job.block_inputs = 2 * kBlockWords;
    job.rounds = true;
    return job;
#else
    job.kernels = kernels_of<PairWeights>();
    break;
#endif
  case DType::float16:
    job.kernels = kernels_of<HalfWeights>();
    job.step_bytes = kPanelOutputs * 2;
    break;
  }
  job.widens = call.n_rows > kFusedRows;
  if (job.widens)
    job.kernels = kernels_of<Float32Weights>();
  return job;
}

// Prepare one block of inputs of some rows.
void prepare_rows(const LinearJob &job, int64_t row, int64_t n_rows, int64_t block, uint32_t *to) {
  const LinearCall &call = *job.call;
  int64_t from = block * job.block_inputs;
  int64_t end = from + job.block_inputs < job.w->n_in ? from + job.block_inputs : job.w->n_in;
  const float *x = call.x + row * call.x_stride;
#ifdef HALFMOON_BF16_DOT
  if (job.rounds) {
    for (int64_t r = 0; r < n_rows; ++r)
      round_row(x + r * call.x_stride + from, end - from, to + r * kRowWords);
    return;
  }
#endif
  copy_rows(x, call.x_stride, n_rows, from, end, job.step_inputs == 2,
            reinterpret_cast<float *>(to));
}

// What a thread's scratch of rows holds.
struct PreparedRows {
  uint64_t job_number = 0;
  int64_t row = 0;
};
thread_local PreparedRows prepared;
uint64_t n_jobs = 0;

const uint32_t *prepare_block(const LinearJob &job, int64_t row, int64_t n_rows) {
  int64_t n_blocks = job.n_blocks(), block_words = n_rows * kRowWords;
  uint32_t *rows = static_cast<uint32_t *>(
      scratch(ScratchSlot::rows, static_cast<size_t>(n_blocks * block_words) * 4));
  if (prepared.job_number == job.number && prepared.row == row)
    return rows;
  for (int64_t block = 0; block < n_blocks; ++block)
    prepare_rows(job, row, n_rows, block, rows + block * block_words);
  prepared = {job.number, row};
  return rows;
}

// Compute panels `panel` … `end`-1 of y for some rows.
void multiply(const LinearJob &job, int64_t row, int64_t n_rows, int64_t panel, int64_t end) {
  const LinearCall &call = *job.call;
  const Packed &w = *job.w;
  int64_t n_blocks = job.n_blocks(), n_groups = (n_rows + kGroupRows - 1) / kGroupRows;
  const uint32_t *x = job.ready + row * kRowWords;
  int64_t block_words = call.n_rows * kRowWords;
  if (!job.ready) {
    block_words = n_rows * kRowWords;
    x = prepare_block(job, row, n_rows);
  }
  float *sums = static_cast<float *>(
      scratch(ScratchSlot::sums, static_cast<size_t>(n_rows * kPanelOutputs) * 4));
  for (int64_t i = panel * n_blocks; i < end * n_blocks; ++i) {
    int64_t p = i / n_blocks, block = i % n_blocks, from = block * job.block_inputs;
    int64_t n_inputs = w.n_in - from < job.block_inputs ? w.n_in - from : job.block_inputs;
    int64_t part_steps = (n_inputs + job.step_inputs - 1) / job.step_inputs;
    int64_t part_bytes = part_steps * job.step_bytes;
    const char *part = w.weights + p * w.panel_bytes + from / job.step_inputs * job.step_bytes;
    int64_t steps = job.widens ? n_inputs : part_steps;
    // Meanwhile fetch what comes next: of this part where there is but one group, else the next.
    const char *ahead = part + (n_groups > 1 ? part_bytes : kPrefetchBytes);
    int64_t ahead_bytes = n_groups > 1 ? part_bytes / (steps * n_groups) : job.step_bytes;
    if (job.widens) {
      float *wide = static_cast<float *>(
          scratch(ScratchSlot::panel, (kBlockWords + 1) * kPanelOutputs * 4));
      widen_panel(part, w.dtype, n_inputs, wide);
      part = reinterpret_cast<const char *>(wide);
    }
    for (int64_t group = 0; group < n_groups; ++group) {
      int64_t first = n_rows * group / n_groups, last = n_rows * (group + 1) / n_groups;
      float *to = sums + first * kPanelOutputs;
      if (block == n_blocks - 1)
        prefetch_results(call, w, p, row + first, last - first);
      job.kernels[last - first](x + block * block_words + first * kRowWords, part, steps, to,
                                block == 0, ahead + group * steps * ahead_bytes, ahead_bytes);
      if (block == n_blocks - 1)
        finish(call, w, p, row + first, last - first, to);
    }
  }
}

// A call of so little work that waking another thread takes longer.
bool is_tiny(const LinearJob &job) {
  int64_t n_bytes = static_cast<int64_t>(job.w->n_bytes());
  return n_bytes * (1 + job.call->n_rows / 8) < 128 << 10;
}

void prepare_all_rows(LinearJob &job) {
  const LinearCall &call = *job.call;
  int64_t n_blocks = job.n_blocks();
  uint32_t *ready = static_cast<uint32_t *>(
      scratch(ScratchSlot::call_rows, static_cast<size_t>(n_blocks * call.n_rows * kRowWords) * 4));
  constexpr int64_t kPart = 16;
  int64_t n_parts = call.n_rows < 2 * kPart ? 1 : call.n_rows / kPart;
  auto prepare = [&](int64_t task, int) {
    int64_t block = task / n_parts, part = task % n_parts;
    int64_t first = call.n_rows * part / n_parts, last = call.n_rows * (part + 1) / n_parts;
    prepare_rows(job, first, last - first, block, ready + (block * call.n_rows + first) * kRowWords);
  };
  if (call.n_rows * job.w->n_in < 64 << 10) {
    for (int64_t task = 0; task < n_blocks * n_parts; ++task)
      prepare(task, 0);
  } else {
    parallel_for(n_blocks * n_parts, [&](int64_t task, int thread) { prepare(task, thread); });
  }
  job.ready = ready;
}

// Few rows: tasks of about 64 KiB of weights, or of one panel over all rows.
void multiply_few(const LinearJob &job) {
  int64_t n_panels = job.w->n_panels, n_rows = job.call->n_rows;
  int64_t group = (64 << 10) / (job.w->panel_bytes * (1 + n_rows / 16));
  group = group < 1 ? 1 : group;
  auto task = [&](int64_t i, int) {
    int64_t end = (i + 1) * group < n_panels ? (i + 1) * group : n_panels;
    multiply(job, 0, n_rows, i * group, end);
  };
  int64_t n_tasks = (n_panels + group - 1) / group;
  if (is_tiny(job)) {
    for (int64_t i = 0; i < n_tasks; ++i)
      task(i, 0);
  } else {
    parallel_for(n_tasks, [&](int64_t i, int thread) { task(i, thread); });
  }
}

void multiply_many(LinearJob &job) {
  job.number = __atomic_add_fetch(&n_jobs, 1, __ATOMIC_RELAXED);
  int64_t n_panels = job.w->n_panels, n_rows = job.call->n_rows;
  int64_t group_bytes = job.n_blocks() * kGroupRows * kRowWords * 4;
  int64_t row_groups = kTaskBytes / group_bytes;
  int64_t task_rows = (row_groups < 2 ? 2 : row_groups > 8 ? 8 : row_groups) * kGroupRows;
  int64_t n_parts = (n_rows + task_rows - 1) / task_rows;
  int64_t group = 32;
  while (group > 2 && n_parts * ((n_panels + group - 1) / group) < kTasksOfThread * threads())
    group /= 2;
  int64_t n_groups = (n_panels + group - 1) / group;
  parallel_for(n_parts * n_groups, [&](int64_t i, int) {
    int64_t part = i / n_groups, g = i % n_groups;
    int64_t first = n_rows * part / n_parts, last = n_rows * (part + 1) / n_parts;
    multiply(job, first, last - first, n_panels * g / n_groups, n_panels * (g + 1) / n_groups);
  });
}

void linear(const LinearCall &call) {
  LinearJob job = plan_job(call);
  if (call.n_rows > kSharedRows) {
    multiply_many(job);
    return;
  }
  prepare_all_rows(job);
  multiply_few(job);
}

}}} // namespace
