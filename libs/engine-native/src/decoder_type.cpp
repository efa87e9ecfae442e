// The Python type of a decoder: takes its parts, checks them, and runs forwards without the GIL.
#include "binding.h"
#include "decoder.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace halfmoon {
namespace {

constexpr int64_t kMaxLayers = 4096;

struct DecoderObject {
  PyObject_HEAD
  Decoder decoder;
  const Kernels *table;
  Scratch scratch;
  PyObject *parts; // list: linears that layers use
  Buffer *embedding, *head, *ropes[2 * kMaxRopes];
  bool busy;
};

DecoderObject *object_of(PyObject *self) { return reinterpret_cast<DecoderObject *>(self); }

void free_norm(Norm *norm) {
  free(norm->weight);
  free(norm->bias);
  *norm = {};
}

float *copy_floats(const Buffer &buffer, int64_t n) {
  float *copy = static_cast<float *>(malloc(static_cast<size_t>(n) * 4));
  if (copy)
    std::memcpy(copy, buffer.as<float>(), static_cast<size_t>(n) * 4);
  else
    PyErr_NoMemory();
  return copy;
}

// Read None or (kind, weight, bias or None, epsilon) of `n` numbers.
bool read_norm(PyObject *object, const char *what, int64_t n, Norm *out) {
  if (object == Py_None)
    return true;
  const char *kind;
  PyObject *weight, *bias;
  float epsilon;
  if (!PyArg_ParseTuple(object, "sOOf", &kind, &weight, &bias, &epsilon))
    return false;
  bool layer = std::strcmp(kind, "layer") == 0;
  if (!layer && std::strcmp(kind, "rms") != 0) {
    PyErr_Format(PyExc_ValueError, "%s is a norm of kind %s; known are rms, layer", what, kind);
    return false;
  }
  Buffer weight_data, bias_data;
  if (!weight_data.take(weight, what, n * 4, false) ||
      (bias != Py_None && !bias_data.take(bias, what, n * 4, false)) ||
      !(out->weight = copy_floats(weight_data, n)) ||
      (bias != Py_None && !(out->bias = copy_floats(bias_data, n))))
    return false;
  out->kind = layer ? Norm::Kind::layer : Norm::Kind::rms;
  out->n = n;
  out->epsilon = epsilon;
  return true;
}

// A norm of heads: of one head's width, or of all heads'.
bool read_head_norm(PyObject *object, const char *what, int64_t head_dim, int64_t n_heads,
                    Norm *out) {
  if (object == Py_None)
    return true;
  PyObject *weight = PyTuple_Check(object) && PyTuple_GET_SIZE(object) > 1
                         ? PyTuple_GET_ITEM(object, 1)
                         : Py_None;
  Buffer data;
  if (!data.take_any(weight, what, false))
    return false;
  bool each = data.n_bytes() == head_dim * 4;
  data.release();
  return read_norm(object, what, each ? head_dim : head_dim * n_heads, out);
}

// Take a linear of this shape; the decoder keeps it alive.
bool read_linear(DecoderObject *self, PyObject *object, const char *what, int64_t n_in,
                 int64_t n_out, Linear *out) {
  if (!PyObject_TypeCheck(object, &LinearType)) {
    PyErr_Format(PyExc_TypeError, "%s is no Linear", what);
    return false;
  }
  LinearObject *linear = reinterpret_cast<LinearObject *>(object);
  int64_t given = linear->gated ? linear->n_out / 2 : linear->n_out;
  if (linear->n_in != n_in || given != n_out) {
    PyErr_Format(PyExc_ValueError, "%s takes %lld numbers and gives %lld; %lld and %lld are needed",
                 what, static_cast<long long>(linear->n_in), static_cast<long long>(given),
                 static_cast<long long>(n_in), static_cast<long long>(n_out));
    return false;
  }
  if (PyList_Append(self->parts, object) != 0)
    return false;
  *out = {linear->table, linear->packed};
  return true;
}

PyObject *decoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"hidden",      "n_heads",         "n_kv_heads",
                                "head_dim",    "n_pairs",         "embedding",
                                "n_vocab",     "embedding_dtype", "head",
                                "n_logits",    "head_dtype",      "final_norm",
                                "interleaved", "parallel",        "residual_multiplier",
                                "embedding_scale", "first_layer", nullptr};
  long long hidden, n_heads, n_kv_heads, head_dim, n_pairs, n_vocab, n_logits, first_layer = 0;
  PyObject *embedding, *head, *final_norm;
  const char *embedding_dtype, *head_dtype;
  int interleaved = 0, parallel = 0;
  float residual_multiplier = 1, embedding_scale = 1;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "LLLLLOLsOLsO|ppffL", const_cast<char **>(names), &hidden, &n_heads,
          &n_kv_heads, &head_dim, &n_pairs, &embedding, &n_vocab, &embedding_dtype, &head,
          &n_logits, &head_dtype, &final_norm, &interleaved, &parallel, &residual_multiplier,
          &embedding_scale, &first_layer))
    return nullptr;
  constexpr long long kMost = 1 << 24;
  if (hidden < 1 || hidden > kMost || n_heads < 1 || n_heads > kMost || n_kv_heads < 1 ||
      n_heads % n_kv_heads != 0 || head_dim < 1 || head_dim > 1024 || n_pairs < 0 ||
      2 * n_pairs > head_dim || n_vocab < 1 || n_logits < 1 || first_layer < 0 ||
      first_layer > kMost) {
    PyErr_Format(PyExc_ValueError,
                 "a decoder of width %lld, %lld heads over %lld, %lld numbers a head, %lld pairs "
                 "turned, %lld tokens, %lld logits, from layer %lld on",
                 hidden, n_heads, n_kv_heads, head_dim, n_pairs, n_vocab, n_logits, first_layer);
    return nullptr;
  }
  PyObject *object = type->tp_alloc(type, 0);
  if (!object)
    return nullptr;
  DecoderObject *self = object_of(object);
  Decoder &decoder = self->decoder;
  self->table = kernels;
  decoder.hidden = hidden;
  decoder.n_heads = n_heads;
  decoder.n_kv_heads = n_kv_heads;
  decoder.head_dim = head_dim;
  decoder.n_pairs = n_pairs;
  decoder.interleaved = interleaved;
  decoder.parallel = parallel;
  decoder.residual_multiplier = residual_multiplier;
  decoder.embedding_scale = embedding_scale;
  decoder.n_vocab = n_vocab;
  decoder.n_logits = n_logits;
  decoder.first_layer = first_layer;
  self->parts = PyList_New(0);
  self->embedding = new Buffer;
  self->head = new Buffer;
  for (Buffer *&buffer : self->ropes)
    buffer = new Buffer;
  bool good = self->parts && read_dtype(embedding_dtype, &decoder.embedding_dtype) &&
              read_dtype(head_dtype, &decoder.head_dtype) &&
              (embedding == Py_None ||
               self->embedding->take(
                   embedding, "embedding",
                   product(product(n_vocab, hidden),
                           static_cast<int64_t>(size_of(decoder.embedding_dtype))),
                   false)) &&
              read_norm(final_norm, "final_norm", hidden, &decoder.final_norm);
  if (good && (decoder.final_norm.kind == Norm::Kind::none) != (head == Py_None)) {
    PyErr_SetString(PyExc_ValueError,
                    "one of final_norm and head is None; a decoder ends with both or neither");
    good = false;
  }
  if (good && PyObject_TypeCheck(head, &LinearType))
    good = read_linear(self, head, "head", hidden, n_logits, &decoder.head);
  else if (good && head != Py_None)
    good = self->head->take(head, "head",
                            product(product(n_logits, hidden),
                                    static_cast<int64_t>(size_of(decoder.head_dtype))),
                            false);
  if (!good) {
    Py_DECREF(object);
    return nullptr;
  }
  decoder.embedding = embedding == Py_None ? nullptr : self->embedding->as<void>();
  decoder.head_weights =
      decoder.head.packed || head == Py_None ? nullptr : self->head->as<void>();
  return object;
}

void decoder_dealloc(PyObject *object) {
  DecoderObject *self = object_of(object);
  Decoder &decoder = self->decoder;
  for (int64_t i = 0; i < decoder.n_layers; ++i) {
    Layer &layer = decoder.layers[i];
    for (Norm *norm : {&layer.norm, &layer.q_norm, &layer.k_norm, &layer.out_norm, &layer.mlp_norm,
                       &layer.mlp_out_norm})
      free_norm(norm);
    free(layer.sinks);
  }
  free(decoder.layers);
  free_norm(&decoder.final_norm);
  free_scratch(&self->scratch);
  delete self->embedding;
  delete self->head;
  for (Buffer *buffer : self->ropes)
    delete buffer;
  Py_XDECREF(self->parts);
  Py_TYPE(object)->tp_free(object);
}

PyObject *add_layer(PyObject *object, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"norm",     "qkv",          "q_norm",     "k_norm",
                                "rope",     "scale",        "window",     "softcap",
                                "sinks",    "out",          "out_norm",   "mlp_norm",
                                "up",       "activation",   "down",       "mlp_out_norm",
                                nullptr};
  DecoderObject *self = object_of(object);
  Decoder &decoder = self->decoder;
  PyObject *norm, *qkv, *q_norm, *k_norm, *sinks, *out, *out_norm, *mlp_norm, *up, *down,
      *mlp_out_norm;
  const char *activation;
  long long window;
  int rope;
  float scale, softcap;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOifLfOOOOOsOO", const_cast<char **>(names),
                                   &norm, &qkv, &q_norm, &k_norm, &rope, &scale, &window, &softcap,
                                   &sinks, &out, &out_norm, &mlp_norm, &up, &activation, &down,
                                   &mlp_out_norm))
    return nullptr;
  if (self->busy || decoder.n_layers == kMaxLayers || rope < -1 || rope >= kMaxRopes ||
      window < 0 || !(softcap >= 0)) {
    PyErr_Format(PyExc_ValueError, "a layer with window %lld and table of angles %d (of %d)",
                 window, rope, kMaxRopes);
    return nullptr;
  }
  size_t n = static_cast<size_t>(decoder.n_layers) + 1;
  Layer *layers = static_cast<Layer *>(realloc(static_cast<void *>(decoder.layers), n * sizeof(Layer)));
  if (!layers)
    return PyErr_NoMemory();
  decoder.layers = layers;
  Layer &layer = layers[decoder.n_layers] = Layer{};
  ++decoder.n_layers; // its parts are freed with the decoder, however far this comes
  int64_t hidden = decoder.hidden, q_width = decoder.n_heads * decoder.head_dim;
  int64_t qkv_width = q_width + 2 * decoder.n_kv_heads * decoder.head_dim;
  if (!PyObject_TypeCheck(down, &LinearType)) {
    PyErr_SetString(PyExc_TypeError, "down is no Linear");
    return nullptr;
  }
  layer.mlp_width = reinterpret_cast<LinearObject *>(down)->n_in;
  layer.rope = rope;
  layer.window = window;
  layer.softcap = softcap;
  layer.scale = scale;
  Buffer sink_data;
  if (!read_norm(norm, "norm", hidden, &layer.norm) ||
      !read_head_norm(q_norm, "q_norm", decoder.head_dim, decoder.n_heads, &layer.q_norm) ||
      !read_head_norm(k_norm, "k_norm", decoder.head_dim, decoder.n_kv_heads, &layer.k_norm) ||
      !read_norm(out_norm, "out_norm", hidden, &layer.out_norm) ||
      !read_norm(mlp_norm, "mlp_norm", hidden, &layer.mlp_norm) ||
      !read_norm(mlp_out_norm, "mlp_out_norm", hidden, &layer.mlp_out_norm) ||
      !read_linear(self, qkv, "qkv", hidden, qkv_width, &layer.qkv) ||
      !read_linear(self, out, "out", q_width, hidden, &layer.out) ||
      !read_linear(self, up, "up", hidden, layer.mlp_width, &layer.up) ||
      !read_linear(self, down, "down", layer.mlp_width, hidden, &layer.down) ||
      !read_activation(activation, &layer.activation) ||
      (sinks != Py_None && (!sink_data.take(sinks, "sinks", decoder.n_heads * 4, false) ||
                            !(layer.sinks = copy_floats(sink_data, decoder.n_heads)))))
    return nullptr;
  if (decoder.parallel && layer.norm.kind == Norm::Kind::none &&
      layer.mlp_norm.kind == Norm::Kind::none) {
    PyErr_SetString(PyExc_ValueError, "a parallel layer has norm or mlp_norm");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject *set_rope(PyObject *object, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"table", "cosines", "sines", nullptr};
  DecoderObject *self = object_of(object);
  int table;
  PyObject *cosines, *sines;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOO", const_cast<char **>(names), &table,
                                   &cosines, &sines))
    return nullptr;
  if (table < 0 || table >= kMaxRopes || self->busy || self->decoder.n_pairs == 0) {
    PyErr_Format(PyExc_ValueError, "table of angles %d; %d are possible", table, kMaxRopes);
    return nullptr;
  }
  self->decoder.ropes[table] = {};
  Buffer &c = *self->ropes[2 * table], &s = *self->ropes[2 * table + 1];
  if (!c.take_any(cosines, "cosines", false) || !s.take(sines, "sines", c.n_bytes(), false))
    return nullptr;
  self->decoder.ropes[table] = {c.as<float>(), s.as<float>(),
                                c.n_bytes() / 4 / self->decoder.n_pairs};
  Py_RETURN_NONE;
}

// Hooks of a forward; they run with the GIL.
struct Hooks {
  PyObject *before, *after;
};

bool call_hook(PyObject *hook, int32_t layer) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *result = PyObject_CallFunction(hook, "i", layer);
  Py_XDECREF(result);
  PyGILState_Release(state);
  return result != nullptr;
}

// Check what a forward reads: tokens, rows and angles.
bool check_forward(const Decoder &decoder, const BatchObject &batch, const int64_t *tokens,
                   const int64_t *rows, int64_t n_rows) {
  for (int64_t i = 0; i < batch.n_tokens; ++i)
    if (tokens[i] < 0 || tokens[i] >= decoder.n_vocab) {
      PyErr_Format(PyExc_ValueError, "token %lld is not in the vocabulary of %lld",
                   static_cast<long long>(tokens[i]), static_cast<long long>(decoder.n_vocab));
      return false;
    }
  for (int64_t i = 0; i < n_rows; ++i)
    if (rows[i] < 0 || rows[i] >= batch.n_tokens || (i > 0 && rows[i] <= rows[i - 1])) {
      PyErr_Format(PyExc_ValueError, "row %lld of %lld tokens, or not after the one before",
                   static_cast<long long>(rows[i]), static_cast<long long>(batch.n_tokens));
      return false;
    }
  int64_t end = 0;
  for (int64_t i = 0; i < batch.n_runs; ++i)
    if (batch.runs[i].start + batch.runs[i].n_tokens > end)
      end = batch.runs[i].start + batch.runs[i].n_tokens;
  for (int64_t i = 0; i < decoder.n_layers; ++i) {
    int32_t rope = decoder.layers[i].rope;
    if (rope >= 0 && decoder.ropes[rope].n_positions < end) {
      PyErr_Format(PyExc_ValueError, "a run ends at %lld tokens, angles are set for %lld",
                   static_cast<long long>(end),
                   static_cast<long long>(decoder.ropes[rope].n_positions));
      return false;
    }
  }
  const PoolView &pool = batch.pool->view;
  int64_t end_layer = decoder.first_layer + decoder.n_layers;
  if (pool.n_layers < end_layer || pool.n_kv_heads != decoder.n_kv_heads ||
      pool.head_dim != decoder.head_dim) {
    PyErr_Format(PyExc_ValueError,
                 "a pool of %d layers and %d heads of %d numbers; the decoder needs %lld, %lld, %lld",
                 pool.n_layers, pool.n_kv_heads, pool.head_dim,
                 static_cast<long long>(end_layer), static_cast<long long>(decoder.n_kv_heads),
                 static_cast<long long>(decoder.head_dim));
    return false;
  }
  return true;
}

PyObject *forward(PyObject *object, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"batch",       "tokens",     "rows",     "n_rows",
                                "logits",      "before_layer", "after_layer", "part_times",
                                "incoming",    "outgoing",   nullptr};
  DecoderObject *self = object_of(object);
  Decoder &decoder = self->decoder;
  PyObject *batch_object, *tokens, *rows, *logits, *part_times = Py_None;
  PyObject *incoming = Py_None, *outgoing = Py_None;
  Hooks hooks{Py_None, Py_None};
  long long n_rows;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOLO|OOOOO", const_cast<char **>(names),
                                   &BatchType, &batch_object, &tokens, &rows, &n_rows, &logits,
                                   &hooks.before, &hooks.after, &part_times, &incoming, &outgoing))
    return nullptr;
  bool enters = !decoder.embedding, leaves = !decoder.head.packed && !decoder.head_weights;
  if (enters != (incoming != Py_None) || leaves != (outgoing != Py_None) ||
      (leaves && n_rows != 0)) {
    PyErr_Format(PyExc_ValueError,
                 "a decoder %s embedding takes %s incoming activations, and %s head %s outgoing "
                 "ones; %lld rows of logits are wanted",
                 enters ? "without" : "with an", enters ? "given" : "no",
                 leaves ? "without" : "with a", leaves ? "given" : "no", n_rows);
    return nullptr;
  }
  BatchObject *batch = reinterpret_cast<BatchObject *>(batch_object);
  Buffer token_data, row_data, logit_data, time_data, incoming_data, outgoing_data;
  int64_t x_bytes = product(product(batch->n_tokens, decoder.hidden), 4);
  if (!token_data.take(tokens, "tokens", batch->n_tokens * 8, false) ||
      !row_data.take(rows, "rows", product(n_rows, 8), false) ||
      !logit_data.take(logits, "logits", product(product(n_rows, decoder.n_logits), 4), true) ||
      (enters && !incoming_data.take(incoming, "incoming", x_bytes, false)) ||
      (leaves && !outgoing_data.take(outgoing, "outgoing", x_bytes, true)) ||
      (part_times != Py_None &&
       !time_data.take(part_times, "part_times", kParts * sizeof(PartTime), true)) ||
      !check_forward(decoder, *batch, token_data.as<int64_t>(), row_data.as<int64_t>(), n_rows))
    return nullptr;
  if (self->busy) {
    PyErr_SetString(PyExc_RuntimeError, "another thread's forward is running");
    return nullptr;
  }
  ForwardCall call{};
  call.pool = batch->pool->view;
  call.runs = batch->runs;
  call.n_runs = batch->n_runs;
  call.n_tokens = batch->n_tokens;
  call.tokens = token_data.as<int64_t>();
  call.rows = row_data.as<int64_t>();
  call.n_rows = n_rows;
  call.logits = logit_data.as<float>();
  call.incoming = enters ? incoming_data.as<float>() : nullptr;
  call.outgoing = leaves ? outgoing_data.as<float>() : nullptr;
  call.context = &hooks;
  call.times = part_times != Py_None ? time_data.as<PartTime>() : nullptr;
  if (hooks.before != Py_None)
    call.before_layer = [](void *context, int32_t layer) {
      return call_hook(static_cast<Hooks *>(context)->before, layer);
    };
  if (hooks.after != Py_None)
    call.after_layer = [](void *context, int32_t layer) {
      return call_hook(static_cast<Hooks *>(context)->after, layer);
    };
  self->busy = true;
  ForwardResult result = ForwardResult::done;
  Py_BEGIN_ALLOW_THREADS
  if (call.n_tokens > 0)
    result = run_forward(*self->table, decoder, call, &self->scratch);
  Py_END_ALLOW_THREADS
  self->busy = false;
  if (result == ForwardResult::no_memory)
    return PyErr_NoMemory();
  if (result == ForwardResult::stopped) // a hook's error is set
    return nullptr;
  Py_RETURN_NONE;
}

PyCFunction with_keywords(PyObject *(*function)(PyObject *, PyObject *, PyObject *)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"add_layer", with_keywords(add_layer), METH_VARARGS | METH_KEYWORDS, "Append a layer."},
    {"set_rope", with_keywords(set_rope), METH_VARARGS | METH_KEYWORDS,
     "Set the cosines and sines of a table, each [n_positions, n_pairs]."},
    {"forward", with_keywords(forward), METH_VARARGS | METH_KEYWORDS,
     "Run a batch and write the logits of the chosen rows, which rise. part_times: float64, for each\n"
     "of FORWARD_PARTS its seconds, and seconds in which threads had nothing to do; added to.\n"
     "incoming, outgoing: float32, [n_tokens, hidden], of a decoder without embedding or head."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject make_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "halfmoon_engine_native._native.Decoder";
  type.tp_doc = "Layers of a decoder, from tokens or activations to logits or activations.";
  type.tp_basicsize = sizeof(DecoderObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_new = decoder_new;
  type.tp_dealloc = decoder_dealloc;
  type.tp_methods = methods;
  return type;
}

} // namespace

PyTypeObject DecoderType = make_type();

} // namespace halfmoon
