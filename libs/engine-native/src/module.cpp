// The Python module: linears, pools, batches and attention, for tests and for models that run as
// transformers wrote them; whole decoders are in decoder_type.cpp.
#include "binding.h"
#include "parallel.h"
#include "part_times.h"

#include <cstdlib>
#include <cstring>

namespace halfmoon {

const Kernels *kernels = nullptr;

bool Buffer::take_any(PyObject *object, const char *what, bool writable) {
  release();
  if (PyObject_GetBuffer(object, &view_, writable ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE
                                                  : PyBUF_C_CONTIGUOUS) != 0) {
    view_.obj = nullptr;
    return false;
  }
  if (reinterpret_cast<uintptr_t>(view_.buf) % 4 != 0) {
    PyErr_Format(PyExc_ValueError, "%s does not start at a multiple of 4 bytes", what);
    return false;
  }
  return true;
}

bool Buffer::take(PyObject *object, const char *what, int64_t n_bytes, bool writable) {
  if (!take_any(object, what, writable))
    return false;
  if (n_bytes < 0 || view_.len != n_bytes) {
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, %lld are needed", what, view_.len,
                 static_cast<long long>(n_bytes));
    return false;
  }
  return true;
}

bool read_dtype(const char *name, DType *out) {
  static const char *const names[] = {"float32", "bfloat16", "float16"};
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(name, names[i]) == 0) {
      *out = static_cast<DType>(i);
      return true;
    }
  PyErr_Format(PyExc_ValueError, "dtype is %s; known are float32, bfloat16, float16", name);
  return false;
}

bool read_activation(const char *name, Activation *out) {
  static const char *const names[] = {"none", "silu", "gelu_tanh", "gelu", "relu", "relu2"};
  for (int i = 0; i < 6; ++i)
    if (std::strcmp(name, names[i]) == 0) {
      *out = static_cast<Activation>(i);
      return true;
    }
  PyErr_Format(PyExc_ValueError,
               "activation is %s; known are none, silu, gelu_tanh, gelu, relu, relu2", name);
  return false;
}

namespace {

template <typename T> T *object_of(PyObject *self) { return reinterpret_cast<T *>(self); }

// ---- Linear

PyObject *linear_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"weights", "dtype", "n_out", "n_in", "bias", "gated", nullptr};
  PyObject *weights, *bias = Py_None;
  const char *dtype_name;
  long long n_out, n_in;
  int gated = 0;
  DType dtype;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsLL|Op", const_cast<char **>(names), &weights,
                                   &dtype_name, &n_out, &n_in, &bias, &gated) ||
      !read_dtype(dtype_name, &dtype))
    return nullptr;
  if (n_out < 1 || n_in < 1 || (gated && n_out % 2 != 0)) {
    PyErr_Format(PyExc_ValueError, "a%s linear of %lld outputs and %lld inputs",
                 gated ? " gated" : "", n_out, n_in);
    return nullptr;
  }
  Buffer data, bias_data;
  int64_t n_bytes = product(product(n_out, n_in), static_cast<int64_t>(size_of(dtype)));
  if (!data.take(weights, "weights", n_bytes, false) ||
      (bias != Py_None && !bias_data.take(bias, "bias", n_out * 4, false)))
    return nullptr;
  LinearObject *self = object_of<LinearObject>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->table = kernels;
  self->n_out = n_out;
  self->n_in = n_in;
  self->gated = gated;
  const float *bias_at = bias != Py_None ? bias_data.as<float>() : nullptr;
  Py_BEGIN_ALLOW_THREADS
  self->packed =
      self->table->pack_linear(data.as<void>(), dtype, n_out, n_in, n_in, bias_at, gated);
  Py_END_ALLOW_THREADS
  if (!self->packed) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject *>(self);
}

void linear_dealloc(PyObject *object) {
  LinearObject *self = object_of<LinearObject>(object);
  if (self->packed)
    self->table->free_linear(self->packed);
  Py_TYPE(object)->tp_free(object);
}

PyObject *linear_run(PyObject *object, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"x", "y", "n_rows", "activation", "accumulate", "multiplier",
                                nullptr};
  LinearObject *self = object_of<LinearObject>(object);
  PyObject *x, *y;
  long long n_rows;
  const char *activation_name = "none";
  int accumulate = 0;
  float multiplier = 1;
  LinearCall call{};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL|spf", const_cast<char **>(names), &x, &y,
                                   &n_rows, &activation_name, &accumulate, &multiplier) ||
      !read_activation(activation_name, &call.activation))
    return nullptr;
  int64_t n_out = self->gated ? self->n_out / 2 : self->n_out;
  Buffer from, to;
  if (!from.take(x, "x", product(product(n_rows, self->n_in), 4), false) ||
      !to.take(y, "y", product(product(n_rows, n_out), 4), true))
    return nullptr;
  call.weights = self->packed;
  call.x = from.as<float>();
  call.x_stride = self->n_in;
  call.n_rows = n_rows;
  call.y = to.as<float>();
  call.y_stride = n_out;
  call.accumulate = accumulate;
  call.multiplier = multiplier;
  Py_BEGIN_ALLOW_THREADS
  if (n_rows > 0)
    self->table->linear(call);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *linear_n_bytes(PyObject *object, void *) {
  LinearObject *self = object_of<LinearObject>(object);
  return PyLong_FromSize_t(self->table->linear_bytes(self->packed));
}

PyMethodDef linear_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(linear_run)),
     METH_VARARGS | METH_KEYWORDS, "Compute y = multiplier·activation(x·Wᵀ + bias) for n_rows rows."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef linear_getset[] = {
    {"n_bytes", linear_n_bytes, nullptr, "Memory of the packed weights.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// ---- Pool

PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"memory",     "dtype",    "n_layers", "block_size",
                                "n_kv_heads", "head_dim", nullptr};
  PyObject *memory;
  const char *dtype_name;
  int n_layers, block_size, n_kv_heads, head_dim;
  DType dtype;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Osiiii", const_cast<char **>(names), &memory,
                                   &dtype_name, &n_layers, &block_size, &n_kv_heads, &head_dim) ||
      !read_dtype(dtype_name, &dtype))
    return nullptr;
  if (n_layers < 1 || block_size < 1 || n_kv_heads < 1 || head_dim < 1 || head_dim > 1024) {
    PyErr_Format(PyExc_ValueError,
                 "a pool of %d layers, %d tokens a page, %d heads of %d numbers (at most 1024)",
                 n_layers, block_size, n_kv_heads, head_dim);
    return nullptr;
  }
  int64_t page_bytes = product(product(product(2 * static_cast<int64_t>(n_layers), block_size),
                                       product(n_kv_heads, head_dim)),
                               static_cast<int64_t>(size_of(dtype)));
  PoolObject *self = object_of<PoolObject>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  if (PyObject_GetBuffer(memory, &self->memory, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
    Py_DECREF(self);
    return nullptr;
  }
  self->taken = true;
  int64_t n_pages = page_bytes > 0 ? self->memory.len / page_bytes : 0;
  if (n_pages < 1 || n_pages > INT32_MAX || reinterpret_cast<uintptr_t>(self->memory.buf) % 4 != 0) {
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes holds no page, is not aligned to 4 bytes, "
                 "or holds more than 2^31 pages", self->memory.len);
    Py_DECREF(self);
    return nullptr;
  }
  self->view = {static_cast<char *>(self->memory.buf), dtype, n_pages, n_layers, block_size,
                n_kv_heads, head_dim};
  return reinterpret_cast<PyObject *>(self);
}

void pool_dealloc(PyObject *object) {
  PoolObject *self = object_of<PoolObject>(object);
  if (self->taken)
    PyBuffer_Release(&self->memory);
  Py_TYPE(object)->tp_free(object);
}

PyObject *pool_n_pages(PyObject *object, void *) {
  return PyLong_FromLongLong(object_of<PoolObject>(object)->view.n_pages);
}

PyGetSetDef pool_getset[] = {
    {"n_pages", pool_n_pages, nullptr, "Whole pages in the memory.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// ---- Batch

void batch_dealloc(PyObject *object) {
  BatchObject *self = object_of<BatchObject>(object);
  Py_XDECREF(self->pool);
  free(self->runs);
  free(self->pages);
  Py_TYPE(object)->tp_free(object);
}

// Check each run against the pool, so that kernels need no checks.
bool fill_batch(BatchObject *self, const int64_t *lengths, const int64_t *starts,
                const int64_t *n_pages, int64_t n_pages_given) {
  const PoolView &pool = self->pool->view;
  int64_t first_page = 0;
  for (int64_t i = 0; i < self->n_runs; ++i) {
    int64_t end, needed;
    if (lengths[i] < 1 || starts[i] < 0 || n_pages[i] < 0 ||
        __builtin_add_overflow(starts[i], lengths[i], &end) || end > INT32_MAX ||
        n_pages[i] > n_pages_given - first_page) {
      PyErr_Format(PyExc_ValueError, "run %lld has %lld tokens from %lld on, on %lld pages",
                   static_cast<long long>(i), static_cast<long long>(lengths[i]),
                   static_cast<long long>(starts[i]), static_cast<long long>(n_pages[i]));
      return false;
    }
    needed = (end + pool.block_size - 1) / pool.block_size;
    if (needed > n_pages[i]) {
      PyErr_Format(PyExc_ValueError, "run %lld ends at %lld tokens, its %lld pages hold %lld",
                   static_cast<long long>(i), static_cast<long long>(end),
                   static_cast<long long>(n_pages[i]),
                   static_cast<long long>(n_pages[i] * pool.block_size));
      return false;
    }
    for (int64_t p = first_page; p < first_page + needed; ++p)
      if (self->pages[p] < 0 || self->pages[p] >= pool.n_pages) {
        PyErr_Format(PyExc_ValueError, "run %lld names page %d, the pool has %lld",
                     static_cast<long long>(i), self->pages[p],
                     static_cast<long long>(pool.n_pages));
        return false;
      }
    self->runs[i] = {self->n_tokens, lengths[i], starts[i], self->pages + first_page};
    self->n_tokens += lengths[i];
    first_page += n_pages[i];
  }
  return true;
}

PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"pool", "lengths", "starts", "n_pages", "pages", nullptr};
  PyObject *pool, *lengths, *starts, *n_pages, *pages;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOO", const_cast<char **>(names), &PoolType,
                                   &pool, &lengths, &starts, &n_pages, &pages))
    return nullptr;
  Buffer length_data, start_data, count_data, page_data;
  if (!length_data.take_any(lengths, "lengths", false) ||
      !start_data.take(starts, "starts", length_data.n_bytes(), false) ||
      !count_data.take(n_pages, "n_pages", length_data.n_bytes(), false) ||
      !page_data.take_any(pages, "pages", false))
    return nullptr;
  if (length_data.n_bytes() % 8 != 0 || page_data.n_bytes() % 4 != 0) {
    PyErr_Format(PyExc_ValueError,
                 "lengths, starts and n_pages of %lld bytes, pages of %lld: they are int64 and int32",
                 static_cast<long long>(length_data.n_bytes()),
                 static_cast<long long>(page_data.n_bytes()));
    return nullptr;
  }
  BatchObject *self = object_of<BatchObject>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  Py_INCREF(pool);
  self->pool = object_of<PoolObject>(pool);
  self->n_runs = length_data.n_bytes() / 8;
  int64_t n_given = page_data.n_bytes() / 4;
  self->runs = static_cast<RunView *>(calloc(static_cast<size_t>(self->n_runs) + 1, sizeof(RunView)));
  self->pages = static_cast<int32_t *>(calloc(static_cast<size_t>(n_given) + 1, 4));
  if (!self->runs || !self->pages) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  std::memcpy(self->pages, page_data.as<char>(), static_cast<size_t>(n_given) * 4);
  if (!fill_batch(self, length_data.as<int64_t>(), start_data.as<int64_t>(),
                  count_data.as<int64_t>(), n_given)) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject *>(self);
}

PyObject *batch_n_tokens(PyObject *object, void *) {
  return PyLong_FromLongLong(object_of<BatchObject>(object)->n_tokens);
}

PyGetSetDef batch_getset[] = {
    {"n_tokens", batch_n_tokens, nullptr, "Tokens of all runs.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

bool check_layer(const BatchObject *batch, int layer) {
  if (layer >= 0 && layer < batch->pool->view.n_layers)
    return true;
  PyErr_Format(PyExc_ValueError, "layer is %d, the pool has %d", layer,
               batch->pool->view.n_layers);
  return false;
}

// ---- functions

PyObject *write_kv(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"batch", "layer", "keys", "values", nullptr};
  PyObject *batch_object, *keys, *values;
  int layer;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iOO", const_cast<char **>(names), &BatchType,
                                   &batch_object, &layer, &keys, &values))
    return nullptr;
  BatchObject *batch = object_of<BatchObject>(batch_object);
  int64_t width = batch->pool->view.width();
  int64_t n_bytes = product(product(batch->n_tokens, width), 4);
  Buffer key_data, value_data;
  if (!check_layer(batch, layer) || !key_data.take(keys, "keys", n_bytes, false) ||
      !value_data.take(values, "values", n_bytes, false))
    return nullptr;
  WriteCall call{batch->pool->view, layer, batch->runs, batch->n_runs, key_data.as<float>(), width,
                 value_data.as<float>(), width};
  Py_BEGIN_ALLOW_THREADS
  kernels->write_kv(call);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *attend(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"batch", "layer",  "queries", "out",   "n_heads",
                                "scale", "window", "softcap", "sinks", nullptr};
  PyObject *batch_object, *queries, *out, *sinks = Py_None;
  int layer, n_heads;
  float scale, softcap = 0;
  long long window = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iOOif|LfO", const_cast<char **>(names),
                                   &BatchType, &batch_object, &layer, &queries, &out, &n_heads,
                                   &scale, &window, &softcap, &sinks))
    return nullptr;
  BatchObject *batch = object_of<BatchObject>(batch_object);
  const PoolView &pool = batch->pool->view;
  if (!check_layer(batch, layer))
    return nullptr;
  if (n_heads < 1 || n_heads % pool.n_kv_heads != 0 || window < 0 || !(softcap >= 0)) {
    PyErr_Format(PyExc_ValueError, "%d heads over %d of keys, window %lld", n_heads,
                 pool.n_kv_heads, window);
    return nullptr;
  }
  int64_t width = static_cast<int64_t>(n_heads) * pool.head_dim;
  int64_t n_bytes = product(product(batch->n_tokens, width), 4);
  Buffer query_data, out_data, sink_data;
  if (!query_data.take(queries, "queries", n_bytes, false) ||
      !out_data.take(out, "out", n_bytes, true) ||
      (sinks != Py_None && !sink_data.take(sinks, "sinks", static_cast<int64_t>(n_heads) * 4, false)))
    return nullptr;
  AttentionCall call{pool, layer, batch->runs, batch->n_runs, query_data.as<float>(), width,
                     out_data.as<float>(), width, n_heads, scale, window, softcap,
                     sinks != Py_None ? sink_data.as<float>() : nullptr};
  Py_BEGIN_ALLOW_THREADS
  kernels->attend(call);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *linear_unpacked(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"weights", "dtype", "n_out", "n_in", "x", "y", "n_rows", nullptr};
  PyObject *weights, *x, *y;
  const char *dtype_name;
  long long n_out, n_in, n_rows;
  DType dtype;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsLLOOL", const_cast<char **>(names), &weights,
                                   &dtype_name, &n_out, &n_in, &x, &y, &n_rows) ||
      !read_dtype(dtype_name, &dtype))
    return nullptr;
  Buffer data, from, to;
  if (!data.take(weights, "weights",
                 product(product(n_out, n_in), static_cast<int64_t>(size_of(dtype))), false) ||
      !from.take(x, "x", product(product(n_rows, n_in), 4), false) ||
      !to.take(y, "y", product(product(n_rows, n_out), 4), true))
    return nullptr;
  Py_BEGIN_ALLOW_THREADS
  if (n_rows > 0 && n_out > 0)
    kernels->linear_unpacked(data.as<void>(), dtype, n_out, n_in, from.as<float>(), n_in, n_rows,
                             to.as<float>(), n_out);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *instruction_sets(PyObject *, PyObject *) {
  const Kernels *all[8];
  int n = list_kernels(all, 8);
  PyObject *names = PyTuple_New(n);
  for (int i = 0; names && i < n; ++i) {
    PyObject *name = PyUnicode_FromString(all[i]->name);
    if (!name) {
      Py_DECREF(names);
      return nullptr;
    }
    PyTuple_SET_ITEM(names, i, name);
  }
  return names;
}

PyObject *instruction_set(PyObject *, PyObject *) { return PyUnicode_FromString(kernels->name); }

PyObject *use_instruction_set(PyObject *, PyObject *name) {
  const char *wanted = PyUnicode_AsUTF8(name);
  if (!wanted)
    return nullptr;
  const Kernels *table = choose_kernels(wanted);
  if (!table) {
    PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", wanted);
    return nullptr;
  }
  kernels = table;
  Py_RETURN_NONE;
}

PyObject *set_n_threads(PyObject *, PyObject *count) {
  long n = PyLong_AsLong(count);
  if (n == -1 && PyErr_Occurred())
    return nullptr;
  if (n < 1 || n > kMaxThreads) {
    PyErr_Format(PyExc_ValueError, "%ld threads; 1 to %d are possible", n, kMaxThreads);
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  set_threads(static_cast<int>(n));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject *n_threads(PyObject *, PyObject *) { return PyLong_FromLong(threads()); }

PyCFunction with_keywords(PyObject *(*function)(PyObject *, PyObject *, PyObject *)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"write_kv", with_keywords(write_kv), METH_VARARGS | METH_KEYWORDS,
     "Store float32 keys and values of a batch in its pool."},
    {"attend", with_keywords(attend), METH_VARARGS | METH_KEYWORDS,
     "Compute causal attention of a batch over its pool."},
    {"linear_unpacked", with_keywords(linear_unpacked), METH_VARARGS | METH_KEYWORDS,
     "Compute y = x·Wᵀ over weights that stay row-major."},
    {"join_pages", with_keywords(join_pages), METH_VARARGS | METH_KEYWORDS,
     "Join lists of pages into int32 numbers, each checked to be in a pool."},
    {"choose_tokens", with_keywords(choose_tokens), METH_VARARGS | METH_KEYWORDS,
     "Choose a token for each row of scores."},
    {"score_tokens", with_keywords(score_tokens), METH_VARARGS | METH_KEYWORDS,
     "Compute log probabilities of a token of each row and of the likeliest ones."},
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "Return the instruction sets that this processor has kernels for, best first."},
    {"instruction_set", instruction_set, METH_NOARGS, "Return the instruction set in use."},
    {"use_instruction_set", use_instruction_set, METH_O, "Use another instruction set."},
    {"set_threads", set_n_threads, METH_O, "Compute on so many threads, the caller's included."},
    {"threads", n_threads, METH_NOARGS, "Return the number of threads."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Kernels of halfmoon-engine.", -1, functions,
    nullptr, nullptr, nullptr, nullptr};

PyTypeObject make_type(const char *name, const char *doc, size_t size, newfunc make,
                       destructor dealloc, PyMethodDef *methods, PyGetSetDef *getset) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_doc = doc;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_new = make;
  type.tp_dealloc = dealloc;
  type.tp_methods = methods;
  type.tp_getset = getset;
  return type;
}

} // namespace

PyTypeObject LinearType =
    make_type("halfmoon_engine_native._native.Linear", "Packed weights of a linear.",
              sizeof(LinearObject), linear_new, linear_dealloc, linear_methods, linear_getset);
PyTypeObject PoolType =
    make_type("halfmoon_engine_native._native.Pool", "Memory of KV pages; exported while it lives.",
              sizeof(PoolObject), pool_new, pool_dealloc, nullptr, pool_getset);
PyTypeObject BatchType =
    make_type("halfmoon_engine_native._native.Batch", "A checked ragged batch over a pool.",
              sizeof(BatchObject), batch_new, batch_dealloc, nullptr, batch_getset);

} // namespace halfmoon

PyMODINIT_FUNC PyInit__native() {
  using namespace halfmoon;
  kernels = choose_kernels(nullptr);
  PyTypeObject *types[] = {&LinearType, &PoolType, &BatchType, &DecoderType};
  PyObject *module = PyModule_Create(&definition);
  if (!module)
    return nullptr;
  for (PyTypeObject *type : types)
    if (PyType_Ready(type) != 0 ||
        PyModule_AddObjectRef(module, std::strrchr(type->tp_name, '.') + 1,
                              reinterpret_cast<PyObject *>(type)) != 0) {
      Py_DECREF(module);
      return nullptr;
    }
  PyObject *parts = PyTuple_New(kParts);
  for (int i = 0; parts && i < kParts; ++i)
    PyTuple_SET_ITEM(parts, i, PyUnicode_FromString(kPartNames[i]));
  if (!parts || PyModule_AddObjectRef(module, "FORWARD_PARTS", parts) != 0)
    Py_CLEAR(module);
  Py_XDECREF(parts);
  return module;
}
