// Join the page lists of a batch's runs: thousands of Python integers in a long context.
#include "binding.h"

namespace halfmoon {
namespace {

// Append the pages of one run; false with an exception where one is not in the pool.
bool append_pages(PyObject *pages, Py_ssize_t run, long long n_pages, int32_t *to) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pages); ++i) {
    long long page = PyLong_AsLongLong(PyTuple_GET_ITEM(pages, i));
    if (page == -1 && PyErr_Occurred())
      return false;
    if (page < 0 || page >= n_pages) {
      PyErr_Format(PyExc_ValueError, "run %zd names page %lld, the pool has %lld", run, page,
                   n_pages);
      return false;
    }
    to[i] = static_cast<int32_t>(page);
  }
  return true;
}

// Return a tuple of tuples: a list's length could change meanwhile.
PyObject *as_tuples(PyObject *sequences) {
  PyObject *outer = PySequence_Tuple(sequences);
  if (!outer)
    return nullptr;
  PyObject *all = PyTuple_New(PyTuple_GET_SIZE(outer));
  for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(outer); ++i) {
    PyObject *pages = PySequence_Tuple(PyTuple_GET_ITEM(outer, i));
    if (!pages)
      Py_CLEAR(all);
    else
      PyTuple_SET_ITEM(all, i, pages);
  }
  Py_DECREF(outer);
  return all;
}

} // namespace

PyObject *join_pages(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"pages", "n_pages", nullptr};
  PyObject *sequences;
  long long n_pages;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL", const_cast<char **>(names), &sequences,
                                   &n_pages))
    return nullptr;
  if (n_pages < 0 || n_pages > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a pool of %lld pages; 0 to 2^31 - 1 are possible", n_pages);
    return nullptr;
  }
  PyObject *all = as_tuples(sequences);
  if (!all)
    return nullptr;
  Py_ssize_t n_joined = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all); ++i)
    n_joined += PyTuple_GET_SIZE(PyTuple_GET_ITEM(all, i));
  PyObject *joined = PyByteArray_FromStringAndSize(nullptr, n_joined * 4);
  int32_t *to = joined ? reinterpret_cast<int32_t *>(PyByteArray_AS_STRING(joined)) : nullptr;
  for (Py_ssize_t i = 0; joined && i < PyTuple_GET_SIZE(all); ++i) {
    PyObject *pages = PyTuple_GET_ITEM(all, i);
    if (!append_pages(pages, i, n_pages, to))
      Py_CLEAR(joined);
    to += PyTuple_GET_SIZE(pages);
  }
  Py_DECREF(all);
  return joined;
}

} // namespace halfmoon
