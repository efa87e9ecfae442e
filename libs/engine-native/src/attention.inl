// Paged attention and the KV write.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

void write_kv(const WriteCall &call) {
  const PoolView &pool = call.pool;
  int64_t width = pool.width();
  for (int64_t r = 0; r < call.n_runs; ++r) {
    const RunView &run = call.runs[r];
    parallel_for(run.n_tokens, [&](int64_t i, int) {
      int64_t position = run.start + i;
      int64_t page = run.pages[position / pool.block_size];
      int64_t offset = position % pool.block_size * width * static_cast<int64_t>(size_of(pool.dtype));
      from_float(call.keys + (run.row_start + i) * call.key_stride,
                 pool.rows(page, call.layer, 0) + offset, pool.dtype, width);
      from_float(call.values + (run.row_start + i) * call.value_stride,
                 pool.rows(page, call.layer, 1) + offset, pool.dtype, width);
    });
  }
}

// One query and head after the other: plain, and right.
void attend(const AttentionCall &call) {
  const PoolView &pool = call.pool;
  int32_t head_dim = pool.head_dim, n_shared = call.n_heads / pool.n_kv_heads;
  for (int64_t r = 0; r < call.n_runs; ++r) {
    const RunView &run = call.runs[r];
    parallel_for(run.n_tokens * call.n_heads, [&](int64_t task, int) {
      int64_t token = task / call.n_heads;
      int32_t head = static_cast<int32_t>(task % call.n_heads);
      const float *q = call.queries + (run.row_start + token) * call.query_stride + head * head_dim;
      float *out = call.out + (run.row_start + token) * call.out_stride + head * head_dim;
      int64_t last = run.start + token;
      int64_t first = call.window > 0 && last - call.window + 1 > 0 ? last - call.window + 1 : 0;
      float key[1024], most = call.sinks ? call.sinks[head] : -__builtin_inff();
      float total = call.sinks ? 1.0f : 0.0f;
      float sums[1024] = {};
      for (int64_t p = first; p <= last; ++p) {
        int64_t at = (p % pool.block_size * pool.width() + head / n_shared * head_dim) *
                     static_cast<int64_t>(size_of(pool.dtype));
        int64_t page = run.pages[p / pool.block_size];
        to_float(pool.rows(page, call.layer, 0) + at, pool.dtype, key, head_dim);
        float score = 0;
        for (int32_t d = 0; d < head_dim; ++d)
          score += q[d] * key[d];
        score *= call.scale;
        if (call.softcap > 0)
          score = call.softcap * __builtin_tanhf(score / call.softcap);
        float higher = score > most ? score : most;
        float keep = __builtin_expf(most - higher), weight = __builtin_expf(score - higher);
        total = total * keep + weight;
        to_float(pool.rows(page, call.layer, 1) + at, pool.dtype, key, head_dim);
        for (int32_t d = 0; d < head_dim; ++d)
          sums[d] = sums[d] * keep + weight * key[d];
        most = higher;
      }
      for (int32_t d = 0; d < head_dim; ++d)
        out[d] = sums[d] / total;
    });
  }
}

}}} // namespace
