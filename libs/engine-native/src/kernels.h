// Tables of kernels, one per instruction set, and what they take.
#pragma once

#include <cstddef>
#include <cstdint>

namespace halfmoon {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

inline size_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// The pool's memory. Rows of n_kv_heads·head_dim numbers, each one token's keys or values in one
// layer, in this order (halfmoon_protocol.kv_layout):
//
//   row(page, layer, side, slot) = ((page·n_layers + layer)·2 + side)·block_size + slot
//
// side 0 holds keys, side 1 values.
struct PoolView {
  char *base;
  DType dtype;
  int64_t n_pages;
  int32_t n_layers;
  int32_t block_size;
  int32_t n_kv_heads;
  int32_t head_dim;

  int64_t width() const { return static_cast<int64_t>(n_kv_heads) * head_dim; }
  // First row of a page's keys (side 0) or values (side 1).
  char *rows(int64_t page, int32_t layer, int side) const {
    return base + ((page * n_layers + layer) * 2 + side) * block_size * width() *
                      static_cast<int64_t>(size_of(dtype));
  }
};

// Consecutive tokens of one sequence: rows row_start … row_start+n_tokens-1 of the batch, at
// positions start … start+n_tokens-1; position p lies on pages[p / block_size], slot
// p % block_size.
struct RunView {
  int64_t row_start;
  int64_t n_tokens;
  int64_t start;
  const int32_t *pages;
};

// Causal attention of a ragged batch in one layer. Keys and values, the new ones too, are read
// from the pool. Sums are in float32.
struct AttentionCall {
  PoolView pool;
  int32_t layer;
  const RunView *runs;
  int64_t n_runs;
  const float *queries; // [n_tokens, n_heads, head_dim]
  int64_t query_stride; // floats from one token to the next
  float *out;           // like queries
  int64_t out_stride;
  int32_t n_heads;
  float scale;        // of the scores
  int64_t window;     // keys that a query sees, its own included; 0: all
  float softcap;      // scores become softcap·tanh(score / softcap); 0: none
  const float *sinks; // [n_heads] logits that take part in the softmax; nullptr: none
};

// Store float32 keys and values of a batch in the pool, rounded to its dtype (nearest, even).
struct WriteCall {
  PoolView pool;
  int32_t layer;
  const RunView *runs;
  int64_t n_runs;
  const float *keys; // [n_tokens, n_kv_heads, head_dim]
  int64_t key_stride;
  const float *values;
  int64_t value_stride;
};

enum class Activation : int32_t { none = 0, silu = 1, gelu_tanh = 2, gelu = 3, relu = 4, relu2 = 5 };

// Weights of y = x·Wᵀ + b in an order of the kernel's own; made by `pack_linear`.
struct PackedLinear;

// What happens to x·Wᵀ + b before it is stored.
struct LinearCall {
  const PackedLinear *weights;
  const float *x; // [n_rows, n_in]
  int64_t x_stride;
  int64_t n_rows;
  float *y; // [n_rows, n_out], or [n_rows, n_out / 2] of a gated linear
  int64_t y_stride;
  Activation activation; // of the result; of a gated linear: activation(gate)·up
  bool accumulate;       // y += multiplier·result instead of y = multiplier·result
  float multiplier;
};

struct DrawCall;
struct ScoreCall;

struct Kernels {
  const char *name;

  // Pack row-major weights [n_out, n_in] with `row_stride` elements between rows. `bias` is
  // float32 [n_out] or nullptr. `gated`: rows 0 … n_out/2-1 are gates, the rest ups, n_out is even.
  // The weights' own memory is not used afterwards. nullptr: no memory.
  PackedLinear *(*pack_linear)(const void *weights, DType dtype, int64_t n_out, int64_t n_in,
                               int64_t row_stride, const float *bias, bool gated);
  void (*free_linear)(PackedLinear *);
  size_t (*linear_bytes)(const PackedLinear *);
  void (*linear)(const LinearCall &);

  // y[r, o] = Σ_i x[r, i]·w[o, i] over weights that stay row-major (a head shares its embedding's
  // memory); best for few rows.
  void (*linear_unpacked)(const void *weights, DType dtype, int64_t n_out, int64_t n_in,
                          const float *x, int64_t x_stride, int64_t n_rows, float *y,
                          int64_t y_stride);

  void (*attend)(const AttentionCall &);
  void (*write_kv)(const WriteCall &);

  // Rows of n numbers; `out` may be `x`.
  void (*rms_norm)(const float *x, int64_t x_stride, float *out, int64_t out_stride,
                   const float *weight, int64_t n, float epsilon, int64_t n_rows);
  void (*layer_norm)(const float *x, int64_t x_stride, float *out, int64_t out_stride,
                     const float *weight, const float *bias, int64_t n, float epsilon,
                     int64_t n_rows);
  // Turn a token's heads by the angles of its position; see rotary.inl.
  void (*rotate)(float *heads, int64_t n_heads, int64_t head_dim, const float *cosines,
                 const float *sines, int64_t n_pairs, bool interleaved);
  // Convert n numbers.
  void (*to_float)(const void *from, DType dtype, float *to, int64_t n);
  void (*from_float)(const float *from, void *to, DType dtype, int64_t n);

  // Draw the token of one row of scores; see sampling.h.
  int64_t (*draw_token)(const DrawCall &);
  // Compute one row's log probabilities; false where its highest score is no finite number.
  bool (*score_token)(ScoreCall &);
};

// The best table that this processor can run, or the one that `name` asks for; nullptr if it can't.
const Kernels *choose_kernels(const char *name);
// All tables that this processor can run, best first; returns how many.
int list_kernels(const Kernels **out, int limit);

// Of each instruction set; nullptr where it was not compiled.
namespace generic { const Kernels *table(); }
namespace avx2 { const Kernels *table(); }
namespace avx512 { const Kernels *table(); }
namespace avx512_bf16 { const Kernels *table(); }
namespace neon { const Kernels *table(); }

} // namespace halfmoon
