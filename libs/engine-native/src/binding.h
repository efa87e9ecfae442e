// What the Python types of this module share. Each checks all that it is given: kernels trust it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

namespace halfmoon {

// The table in use; chosen at import, changed by `use`.
extern const Kernels *kernels;

// A buffer that is released with its scope.
class Buffer {
public:
  Buffer() { view_.obj = nullptr; }
  ~Buffer() { release(); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;

  // Take a C-contiguous buffer of exactly `n_bytes`, or raise ValueError naming it.
  bool take(PyObject *object, const char *what, int64_t n_bytes, bool writable);
  // Take one of any size.
  bool take_any(PyObject *object, const char *what, bool writable);
  void release() {
    if (view_.obj)
      PyBuffer_Release(&view_);
  }
  template <typename T> T *as() const { return static_cast<T *>(view_.buf); }
  int64_t n_bytes() const { return view_.len; }

private:
  Py_buffer view_;
};

// Read "float32", "bfloat16" or "float16", or raise ValueError.
bool read_dtype(const char *name, DType *out);
bool read_activation(const char *name, Activation *out);

// a·b, or -1 where it overflows or one is negative.
inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result))
    return -1;
  return result;
}

struct LinearObject {
  PyObject_HEAD
  const Kernels *table;
  PackedLinear *packed;
  int64_t n_out, n_in; // of the weights; a gated linear gives n_out / 2 numbers
  bool gated;
};

struct PoolObject {
  PyObject_HEAD
  Py_buffer memory;
  bool taken;
  PoolView view;
};

// A checked batch over one pool.
struct BatchObject {
  PyObject_HEAD
  PoolObject *pool;
  RunView *runs;
  int32_t *pages;
  int64_t n_runs;
  int64_t n_tokens;
};

// Of pages.cpp and sampling.cpp.
PyObject *join_pages(PyObject *, PyObject *args, PyObject *kwargs);
PyObject *choose_tokens(PyObject *, PyObject *args, PyObject *kwargs);
PyObject *score_tokens(PyObject *, PyObject *args, PyObject *kwargs);

extern PyTypeObject LinearType, PoolType, BatchType, DecoderType;

} // namespace halfmoon
