// Run a batch through all layers of a decoder, or of one stage of it.
//
// A layer is one of these, with parts that are missing left out:
//
//   h = norm(x)            x += m·out_norm(out(attend(rotate(qk_norm(qkv(h))))))
//   h = mlp_norm(x)        x += m·mlp_out_norm(down(activation(gate(h))·up(h)))
//
// In a parallel layer both h come from the same x. Activations are float32; weights and KV have the
// checkpoint's type. Long batches go through a layer in blocks of rows, so that what lies between
// two matrices stays small; a block sees the KV of the blocks before it in the pool.
#pragma once

#include "kernels.h"
#include "part_times.h"

namespace halfmoon {

struct Norm {
  enum class Kind : int32_t { none, rms, layer } kind = Kind::none;
  float *weight = nullptr; // owned
  float *bias = nullptr;   // owned
  int64_t n = 0;           // numbers of weight; a row is cut into pieces of so many
  float epsilon = 0;
};

struct Linear {
  const Kernels *table = nullptr;
  const PackedLinear *packed = nullptr;
};

struct Layer {
  Norm norm, q_norm, k_norm, out_norm, mlp_norm, mlp_out_norm;
  Linear qkv, out, up, down;
  int64_t mlp_width = 0; // numbers that `down` takes
  Activation activation = Activation::none;
  int32_t rope = -1; // table of angles; -1: positions are not encoded
  int64_t window = 0;
  float softcap = 0;
  float scale = 1;
  float *sinks = nullptr; // owned, [n_heads]
};

struct Rope {
  const float *cosines = nullptr; // [n_positions, n_pairs]
  const float *sines = nullptr;
  int64_t n_positions = 0;
};

constexpr int kMaxRopes = 4;

struct Decoder {
  int64_t hidden, n_heads, n_kv_heads, head_dim;
  int64_t n_pairs; // turned pairs of a head
  bool interleaved, parallel;
  float residual_multiplier, embedding_scale;
  const void *embedding; // [n_vocab, hidden]; null: activations come from the stage before
  DType embedding_dtype;
  int64_t n_vocab;
  Norm final_norm;
  Linear head; // packed; else weights below
  const void *head_weights; // null where none is packed: activations go to the next stage
  DType head_dtype;
  int64_t n_logits;
  Layer *layers;
  int64_t n_layers;
  int64_t first_layer; // its place in a page of the pool; the others follow
  Rope ropes[kMaxRopes];
};

// Grows and is kept from forward to forward.
struct Scratch {
  float *x = nullptr;
  float *blocks = nullptr;
  size_t x_bytes = 0, block_bytes = 0;
};

struct ForwardCall {
  PoolView pool;
  const RunView *runs;
  int64_t n_runs;
  int64_t n_tokens;
  const int64_t *tokens; // [n_tokens], checked
  const int64_t *rows;   // [n_rows] rows whose logits are wanted, rising, checked
  int64_t n_rows;
  float *logits; // [n_rows, n_logits]
  const float *incoming = nullptr; // [n_tokens, hidden] in place of embedded tokens
  float *outgoing = nullptr;       // [n_tokens, hidden] in place of logits
  // Called before a layer's KV is read and after its new KV is stored; false ends the forward.
  bool (*before_layer)(void *context, int32_t layer);
  bool (*after_layer)(void *context, int32_t layer);
  void *context;
  PartTime *times = nullptr; // [kParts], added to; nullptr: parts are not timed
};

enum class ForwardResult { done, no_memory, stopped };

ForwardResult run_forward(const Kernels &kernels, const Decoder &decoder, const ForwardCall &call,
                          Scratch *scratch);
void free_scratch(Scratch *scratch);

} // namespace halfmoon
