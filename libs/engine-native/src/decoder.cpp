#include "decoder.h"

#include "parallel.h"

#include <cstdlib>
#include <cstring>

namespace halfmoon {
namespace {

// Rows that go through a layer together.
constexpr int64_t kBlockRows = 1024;
// Rows of a task of norms and rotations; fewer rows in all stay on the caller's thread.
constexpr int64_t kTaskRows = 8;
// Of a block's rows, the share of wanted ones below which the last layer computes only those.
constexpr int64_t kFewRows = 4;

// Memory of a block's rows between the matrices.
struct Block {
  float *h, *h2, *qkv, *attended, *mid;
  RunView *runs;         // of the block's rows
  int64_t *positions;    // of the block's rows
  const int32_t **pages; // of the block's rows
};

bool grow(float **memory, size_t *have, size_t want) {
  if (want <= *have)
    return true;
  free(*memory);
  *have = 0;
  want += want / 4;
  *memory = static_cast<float *>(aligned_alloc(64, (want + 63) / 64 * 64));
  if (!*memory)
    return false;
  *have = want;
  return true;
}

template <typename F> void over_rows(int64_t n_rows, F &&f) {
  int64_t n_tasks = (n_rows + kTaskRows - 1) / kTaskRows;
  parallel_for(n_tasks, [&](int64_t task, int) {
    int64_t begin = task * kTaskRows;
    int64_t end = begin + kTaskRows < n_rows ? begin + kTaskRows : n_rows;
    f(begin, end);
  });
}

void norm_rows(const Kernels &kernels, const Norm &norm, const float *x, int64_t x_stride,
               float *out, int64_t out_stride, int64_t width, int64_t n_rows) {
  if (norm.kind == Norm::Kind::rms)
    kernels.rms_norm(x, x_stride, out, out_stride, norm.weight, width, norm.epsilon, n_rows);
  else
    kernels.layer_norm(x, x_stride, out, out_stride, norm.weight, norm.bias, width, norm.epsilon,
                       n_rows);
}

// One token's heads: all at once, each by the same weights, or each by its own.
void norm_heads(const Kernels &kernels, const Norm &norm, float *heads, int64_t n_heads,
                int64_t head_dim) {
  if (norm.kind == Norm::Kind::none)
    return;
  int64_t width = n_heads * head_dim;
  if (norm.n == head_dim) {
    norm_rows(kernels, norm, heads, head_dim, heads, head_dim, head_dim, n_heads);
  } else if (norm.kind == Norm::Kind::rms) {
    norm_rows(kernels, norm, heads, width, heads, width, width, 1);
  } else {
    for (int64_t h = 0; h < n_heads; ++h)
      kernels.layer_norm(heads + h * head_dim, head_dim, heads + h * head_dim, head_dim,
                         norm.weight + h * head_dim, nullptr, head_dim, norm.epsilon, 1);
  }
}

class Forward {
public:
  Forward(const Kernels &kernels, const Decoder &decoder, const ForwardCall &call, Scratch *scratch)
      : kernels_(kernels), decoder_(decoder), call_(call), scratch_(scratch),
        q_width_(decoder.n_heads * decoder.head_dim),
        kv_width_(decoder.n_kv_heads * decoder.head_dim), qkv_width_(q_width_ + 2 * kv_width_) {}

  ForwardResult run() {
    if (!take_memory())
      return ForwardResult::no_memory;
    if (call_.incoming)
      copy(x_, call_.incoming, call_.n_tokens * decoder_.hidden);
    else
      embed();
    for (int64_t l = 0; l < decoder_.n_layers; ++l)
      if (!run_layer(l))
        return ForwardResult::stopped;
    if (call_.outgoing)
      copy(call_.outgoing, x_, call_.n_tokens * decoder_.hidden);
    else
      compute_logits();
    return ForwardResult::done;
  }

private:
  bool take_memory() {
    int64_t hidden = decoder_.hidden, mlp_width = 0;
    for (int64_t l = 0; l < decoder_.n_layers; ++l)
      if (decoder_.layers[l].mlp_width > mlp_width)
        mlp_width = decoder_.layers[l].mlp_width;
    int64_t n = call_.n_tokens < kBlockRows ? call_.n_tokens : kBlockRows;
    // Beside x: the wanted rows after the last layer.
    size_t x_floats = static_cast<size_t>((call_.n_tokens + call_.n_rows) * hidden);
    size_t block_floats =
        static_cast<size_t>(n * (2 * hidden + qkv_width_ + q_width_ + mlp_width));
    size_t words = static_cast<size_t>(n) * (sizeof(RunView) + 16);
    if (!grow(&scratch_->x, &scratch_->x_bytes, x_floats * 4) ||
        !grow(&scratch_->blocks, &scratch_->block_bytes, block_floats * 4 + 128 + words))
      return false;
    x_ = scratch_->x;
    chosen_ = x_ + call_.n_tokens * hidden;
    block_.h = scratch_->blocks;
    block_.h2 = block_.h + n * hidden;
    block_.qkv = block_.h2 + n * hidden;
    block_.attended = block_.qkv + n * qkv_width_;
    block_.mid = block_.attended + n * q_width_;
    uintptr_t end = reinterpret_cast<uintptr_t>(block_.mid + n * mlp_width);
    char *rest = reinterpret_cast<char *>((end + 63) / 64 * 64);
    block_.runs = reinterpret_cast<RunView *>(rest);
    block_.positions = reinterpret_cast<int64_t *>(block_.runs + n);
    block_.pages = reinterpret_cast<const int32_t **>(block_.positions + n);
    return true;
  }

  void embed() {
    PartTimer timer(call_.times, Part::embedding);
    int64_t hidden = decoder_.hidden;
    size_t row_bytes = static_cast<size_t>(hidden) * size_of(decoder_.embedding_dtype);
    over_rows(call_.n_tokens, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const char *from = static_cast<const char *>(decoder_.embedding) +
                           static_cast<size_t>(call_.tokens[row]) * row_bytes;
        float *to = x_ + row * hidden;
        kernels_.to_float(from, decoder_.embedding_dtype, to, hidden);
        if (decoder_.embedding_scale != 1)
          for (int64_t i = 0; i < hidden; ++i)
            to[i] *= decoder_.embedding_scale;
      }
    });
  }

  bool run_layer(int64_t index) {
    int32_t own = static_cast<int32_t>(index);
    int32_t number = static_cast<int32_t>(decoder_.first_layer + index); // in the pool
    if (!call_hook(call_.before_layer, own))
      return false;
    int64_t run = 0, token = 0; // the first that no block has taken
    for (int64_t begin = 0; begin < call_.n_tokens; begin += kBlockRows) {
      int64_t n = call_.n_tokens - begin < kBlockRows ? call_.n_tokens - begin : kBlockRows;
      int64_t n_runs = cut_runs(n, &run, &token);
      compute_kv(decoder_.layers[index], number, begin, n, n_runs);
      if (begin + n == call_.n_tokens && !call_hook(call_.after_layer, own))
        return false;
      if (index + 1 == decoder_.n_layers && !call_.outgoing)
        run_last_rows(decoder_.layers[index], number, begin, n, n_runs);
      else
        run_rows(decoder_.layers[index], number, n_runs, block_.qkv, n,
                 x_ + begin * decoder_.hidden);
    }
    return true;
  }

  bool call_hook(bool (*hook)(void *, int32_t), int32_t number) {
    PartTimer timer(call_.times, Part::hooks);
    return !hook || hook(call_.context, number);
  }

  // Fill the block's runs, with rows counted from the block's first; return how many there are.
  int64_t cut_runs(int64_t n_rows, int64_t *run, int64_t *token) {
    int64_t n_runs = 0;
    for (int64_t row = 0; row < n_rows;) {
      const RunView &whole = call_.runs[*run];
      int64_t n = whole.n_tokens - *token < n_rows - row ? whole.n_tokens - *token : n_rows - row;
      block_.runs[n_runs++] = {row, n, whole.start + *token, whole.pages};
      for (int64_t i = 0; i < n; ++i) {
        block_.positions[row + i] = whole.start + *token + i;
        block_.pages[row + i] = whole.pages;
      }
      row += n;
      *token += n;
      if (*token == whole.n_tokens) {
        ++*run;
        *token = 0;
      }
    }
    return n_runs;
  }

  // Compute queries, keys and values of the block and store its KV.
  void compute_kv(const Layer &layer, int32_t number, int64_t begin, int64_t n, int64_t n_runs) {
    int64_t hidden = decoder_.hidden;
    const float *x = x_ + begin * hidden;
    const float *h = x;
    if (layer.norm.kind != Norm::Kind::none) {
      norm_block(layer.norm, x, n, block_.h);
      h = block_.h;
    }
    multiply(Part::qkv, layer.qkv, h, hidden, n, block_.qkv, qkv_width_);
    place_rows(layer, n);
    PartTimer timer(call_.times, Part::kv_write);
    kernels_.write_kv({call_.pool, number, block_.runs, n_runs, block_.qkv + q_width_, qkv_width_,
                       block_.qkv + q_width_ + kv_width_, qkv_width_});
  }

  void place_rows(const Layer &layer, int64_t n) {
    PartTimer timer(call_.times, Part::rotary);
    bool normed = layer.q_norm.kind != Norm::Kind::none || layer.k_norm.kind != Norm::Kind::none;
    if (normed || layer.rope >= 0)
      over_rows(n, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row)
          place_heads(layer, block_.qkv + row * qkv_width_, block_.positions[row]);
      });
  }

  // Norm one token's queries and keys and turn them to its position.
  void place_heads(const Layer &layer, float *qkv, int64_t position) {
    norm_heads(kernels_, layer.q_norm, qkv, decoder_.n_heads, decoder_.head_dim);
    norm_heads(kernels_, layer.k_norm, qkv + q_width_, decoder_.n_kv_heads, decoder_.head_dim);
    if (layer.rope < 0)
      return;
    const Rope &rope = decoder_.ropes[layer.rope];
    int64_t at = position * decoder_.n_pairs;
    kernels_.rotate(qkv, decoder_.n_heads + decoder_.n_kv_heads, decoder_.head_dim,
                    rope.cosines + at, rope.sines + at, decoder_.n_pairs, decoder_.interleaved);
  }

  // The rest of a layer for n rows of x; block_.h holds their norm where the layer has one.
  void run_rows(const Layer &layer, int32_t number, int64_t n_runs, const float *queries, int64_t n,
                float *x) {
    int64_t hidden = decoder_.hidden;
    attend(layer, number, n_runs, queries);
    const float *h = block_.h;
    if (decoder_.parallel) {
      // From x as it was before attention.
      if (layer.mlp_norm.kind != Norm::Kind::none)
        norm_block(layer.mlp_norm, x, n, block_.h);
      add(Part::out, layer.out, layer.out_norm, block_.attended, q_width_, n, x);
    } else {
      add(Part::out, layer.out, layer.out_norm, block_.attended, q_width_, n, x);
      if (layer.mlp_norm.kind != Norm::Kind::none)
        norm_block(layer.mlp_norm, x, n, block_.h);
      else
        h = x;
    }
    multiply(Part::up, layer.up, h, hidden, n, block_.mid, layer.mlp_width, layer.activation);
    add(Part::down, layer.down, layer.mlp_out_norm, block_.mid, layer.mlp_width, n, x);
  }

  void attend(const Layer &layer, int32_t number, int64_t n_runs, const float *queries) {
    PartTimer timer(call_.times, Part::attention);
    kernels_.attend({call_.pool, number, block_.runs, n_runs, queries, qkv_width_, block_.attended,
                     q_width_, static_cast<int32_t>(decoder_.n_heads), layer.scale, layer.window,
                     layer.softcap, layer.sinks});
  }

  void multiply(Part part, const Linear &linear, const float *x, int64_t x_width, int64_t n_rows,
                float *y, int64_t y_width, Activation activation = Activation::none,
                bool accumulate = false, float multiplier = 1) {
    PartTimer timer(call_.times, part);
    linear.table->linear(
        {linear.packed, x, x_width, n_rows, y, y_width, activation, accumulate, multiplier});
  }

  void norm_block(const Norm &norm, const float *x, int64_t n, float *out) {
    PartTimer timer(call_.times, Part::norms);
    int64_t hidden = decoder_.hidden;
    over_rows(n, [&](int64_t from, int64_t to) {
      norm_rows(kernels_, norm, x + from * hidden, hidden, out + from * hidden, hidden, hidden,
                to - from);
    });
  }

  // x += multiplier·norm(linear(from))
  void add(Part part, const Linear &linear, const Norm &norm, const float *from, int64_t width,
           int64_t n, float *x) {
    int64_t hidden = decoder_.hidden;
    float multiplier = decoder_.residual_multiplier;
    if (norm.kind == Norm::Kind::none) {
      multiply(part, linear, from, width, n, x, hidden, Activation::none, true, multiplier);
      return;
    }
    multiply(part, linear, from, width, n, block_.h2, hidden);
    PartTimer timer(call_.times, Part::norms);
    over_rows(n, [&](int64_t begin, int64_t end) {
      float *added = block_.h2 + begin * hidden, *to = x + begin * hidden;
      norm_rows(kernels_, norm, added, hidden, added, hidden, hidden, end - begin);
      for (int64_t i = 0; i < (end - begin) * hidden; ++i)
        to[i] += multiplier * added[i];
    });
  }

  // The last layer: only rows whose logits are wanted go on; they end in chosen_.
  void run_last_rows(const Layer &layer, int32_t number, int64_t begin, int64_t n, int64_t n_runs) {
    int64_t hidden = decoder_.hidden, first = next_row_, end = first;
    while (end < call_.n_rows && call_.rows[end] < begin + n)
      ++end;
    next_row_ = end;
    int64_t n_wanted = end - first;
    float *x = x_ + begin * hidden, *chosen = chosen_ + first * hidden;
    if (n_wanted * kFewRows >= n) {
      run_rows(layer, number, n_runs, block_.qkv, n, x);
      for (int64_t i = 0; i < n_wanted; ++i)
        copy(chosen + i * hidden, x + (call_.rows[first + i] - begin) * hidden, hidden);
      return;
    }
    // Rows rise, so a packed row lies at or before its source and overwrites none to come.
    for (int64_t i = 0; i < n_wanted; ++i) {
      int64_t row = call_.rows[first + i] - begin;
      block_.runs[i] = {i, 1, block_.positions[row], block_.pages[row]};
      copy(chosen + i * hidden, x + row * hidden, hidden);
      copy(block_.h + i * hidden, block_.h + row * hidden, hidden);
      copy(block_.qkv + i * qkv_width_, block_.qkv + row * qkv_width_, q_width_);
    }
    if (n_wanted > 0)
      run_rows(layer, number, n_wanted, block_.qkv, n_wanted, chosen);
  }

  void compute_logits() {
    int64_t hidden = decoder_.hidden;
    if (call_.n_rows == 0)
      return;
    norm_block(decoder_.final_norm, chosen_, call_.n_rows, chosen_);
    if (decoder_.head.packed) {
      multiply(Part::head, decoder_.head, chosen_, hidden, call_.n_rows, call_.logits,
               decoder_.n_logits);
      return;
    }
    PartTimer timer(call_.times, Part::head);
    kernels_.linear_unpacked(decoder_.head_weights, decoder_.head_dtype, decoder_.n_logits,
                             hidden, chosen_, hidden, call_.n_rows, call_.logits,
                             decoder_.n_logits);
  }

  static void copy(float *to, const float *from, int64_t n) {
    std::memmove(to, from, static_cast<size_t>(n) * 4);
  }

  const Kernels &kernels_;
  const Decoder &decoder_;
  const ForwardCall &call_;
  Scratch *scratch_;
  int64_t q_width_, kv_width_, qkv_width_;
  float *x_ = nullptr;      // [n_tokens, hidden]
  float *chosen_ = nullptr; // [n_rows, hidden]
  int64_t next_row_ = 0;    // first of call_.rows that the last layer has not reached
  Block block_{};
};

} // namespace

ForwardResult run_forward(const Kernels &kernels, const Decoder &decoder, const ForwardCall &call,
                          Scratch *scratch) {
  if (call.times)
    time_threads(true);
  ForwardResult result = Forward(kernels, decoder, call, scratch).run();
  if (call.times)
    time_threads(false);
  return result;
}

void free_scratch(Scratch *scratch) {
  free(scratch->x);
  free(scratch->blocks);
  *scratch = {};
}

} // namespace halfmoon
