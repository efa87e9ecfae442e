// Store new keys and values in the pages, rounded to the pool's dtype.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Tokens of a task hold about so many bytes: less is not worth a thread.
constexpr int64_t kWriteBytes = 256 * 1024;

#if HALFMOON_LANES == 16
#define HALFMOON_STORE_F16 1
inline void store_f16(char *to, Floats x) {
  __m256i halves = _mm512_maskz_cvtps_ph(kAllLanes, reinterpret_cast<__m512>(x),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(to, &halves, sizeof halves);
}
#elif HALFMOON_LANES == 8
#define HALFMOON_STORE_F16 1
inline void store_f16(char *to, Floats x) {
  __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(x),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(to, &halves, sizeof halves);
}
#elif defined(__aarch64__)
#define HALFMOON_STORE_F16 1
inline void store_f16(char *to, Floats x) {
  float16x4_t halves = vcvt_f16_f32(reinterpret_cast<float32x4_t>(x));
  memcpy(to, &halves, sizeof halves);
}
#endif

// Store n numbers, rounded to the pool's dtype.
inline void store_numbers(const float *from, char *to, DType dtype, int64_t n) {
  int64_t done = 0;
#ifdef HALFMOON_STORE_F16
  if (dtype == DType::float16)
    for (; done + kLanes <= n; done += kLanes)
      store_f16(to + done * 2, load(from + done));
#endif
  from_float(from + done, to + done * static_cast<int64_t>(size_of(dtype)), dtype, n - done);
}

inline void write_token(const WriteCall &call, const RunView &run, int64_t i) {
  const PoolView &pool = call.pool;
  int64_t position = run.start + i, width = pool.width();
  int64_t page = run.pages[position / pool.block_size];
  int64_t offset = position % pool.block_size * width * static_cast<int64_t>(size_of(pool.dtype));
  store_numbers(call.keys + (run.row_start + i) * call.key_stride,
                pool.rows(page, call.layer, 0) + offset, pool.dtype, width);
  store_numbers(call.values + (run.row_start + i) * call.value_stride,
                pool.rows(page, call.layer, 1) + offset, pool.dtype, width);
}

void write_kv(const WriteCall &call) {
  if (call.n_runs == 0)
    return;
  // Runs' rows follow each other.
  int64_t first_row = call.runs[0].row_start;
  const RunView &last = call.runs[call.n_runs - 1];
  int64_t n_tokens = last.row_start + last.n_tokens - first_row;
  int64_t a_task = at_least(1, kWriteBytes / (2 * call.pool.width() * 4));
  parallel_for(divide_up(n_tokens, a_task), [&](int64_t task, int) {
    int64_t row = first_row + task * a_task, end = at_most(row + a_task, first_row + n_tokens);
    // The last run that begins at or before the row.
    int64_t low = 0, high = call.n_runs - 1;
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (call.runs[middle].row_start <= row)
        low = middle;
      else
        high = middle - 1;
    }
    for (int64_t r = low; r < call.n_runs && row < end; ++r) {
      const RunView &run = call.runs[r];
      for (; row < at_most(end, run.row_start + run.n_tokens); ++row)
        write_token(call, run, row - run.row_start);
    }
  });
}

}}} // namespace
