// The Python functions that choose tokens and score them, rows side by side.
#include "sampling.h"

#include "binding.h"
#include "buffers.h"
#include "parallel.h"
#include "score_changes.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace halfmoon {
namespace {

// One row of `choose_tokens`.
struct Row {
  DrawCall draw;
  ScoreChanges changes;
  Py_buffer allowed; // [n_vocab] bytes; without an object: all tokens are allowed
  int64_t token;
};

struct Rows {
  Row *all = nullptr;
  int64_t n = 0;

  explicit Rows(int64_t count)
      : all(static_cast<Row *>(calloc(static_cast<size_t>(count) + 1, sizeof(Row)))), n(count) {}
  Rows(const Rows &) = delete;
  Rows &operator=(const Rows &) = delete;
  ~Rows() {
    for (int64_t i = 0; all && i < n; ++i) {
      free(all[i].changes.biased);
      free(all[i].changes.biases);
      free(all[i].changes.history);
      if (all[i].allowed.obj)
        PyBuffer_Release(&all[i].allowed);
    }
    free(all);
  }
};

// A sequence as a tuple, of a length that stays; released with its scope.
struct Items {
  PyObject *object;

  explicit Items(PyObject *sequence) : object(PySequence_Tuple(sequence)) {}
  Items(const Items &) = delete;
  Items &operator=(const Items &) = delete;
  ~Items() { Py_XDECREF(object); }
  int64_t n() const { return PyTuple_GET_SIZE(object); }
  PyObject *operator[](int64_t i) const { return PyTuple_GET_ITEM(object, i); }
};

bool check_vocabulary(int64_t n_vocab) {
  if (n_vocab >= 1 && n_vocab <= INT32_MAX)
    return true;
  PyErr_Format(PyExc_ValueError, "a vocabulary of %lld tokens; 1 to 2^31 - 1 are possible",
               static_cast<long long>(n_vocab));
  return false;
}

bool read_token(PyObject *object, int64_t n_vocab, int32_t *out) {
  long long token = PyLong_AsLongLong(object);
  if (token == -1 && PyErr_Occurred())
    return false;
  if (token < 0 || token >= n_vocab) {
    PyErr_Format(PyExc_ValueError, "token %lld is not in the vocabulary of %lld", token,
                 static_cast<long long>(n_vocab));
    return false;
  }
  *out = static_cast<int32_t>(token);
  return true;
}

template <typename T> T *room_for(int64_t n) {
  T *room = static_cast<T *>(calloc(static_cast<size_t>(n) + 1, sizeof(T)));
  if (!room)
    PyErr_NoMemory();
  return room;
}

// Read ((token, bias), …).
bool read_biases(PyObject *object, int64_t n_vocab, ScoreChanges &changes) {
  Items pairs(object);
  if (!pairs.object || !(changes.biased = room_for<int32_t>(pairs.n())) ||
      !(changes.biases = room_for<float>(pairs.n())))
    return false;
  for (int64_t i = 0; i < pairs.n(); ++i) {
    PyObject *token;
    double bias;
    if (!PyTuple_Check(pairs[i])) {
      PyErr_SetString(PyExc_TypeError, "a bias is a tuple of a token and a number");
      return false;
    }
    if (!PyArg_ParseTuple(pairs[i], "Od", &token, &bias) ||
        !read_token(token, n_vocab, &changes.biased[i]))
      return false;
    changes.biases[i] = static_cast<float>(bias);
  }
  changes.n_biased = pairs.n();
  return true;
}

// Read (tokens so far, those of the prompt, repetition, presence, frequency).
bool read_penalties(PyObject *object, int64_t n_vocab, ScoreChanges &changes) {
  PyObject *history;
  long long n_prompt;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "penalties are a tuple of five");
    return false;
  }
  if (!PyArg_ParseTuple(object, "OLfdd", &history, &n_prompt, &changes.repetition,
                        &changes.presence, &changes.frequency))
    return false;
  Items tokens(history);
  if (!tokens.object || !(changes.history = room_for<int32_t>(tokens.n())))
    return false;
  if (n_prompt < 0 || tokens.n() > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a history of %lld tokens, %lld of them the prompt's",
                 static_cast<long long>(tokens.n()), n_prompt);
    return false;
  }
  for (int64_t i = 0; i < tokens.n(); ++i)
    if (!read_token(tokens[i], n_vocab, &changes.history[i]))
      return false;
  changes.n_history = tokens.n();
  changes.n_prompt = n_prompt;
  return true;
}

bool read_allowed(PyObject *object, int64_t n_vocab, Py_buffer &allowed) {
  if (PyObject_GetBuffer(object, &allowed, PyBUF_C_CONTIGUOUS) != 0) {
    allowed.obj = nullptr;
    return false;
  }
  if (allowed.len == n_vocab)
    return true;
  PyErr_Format(PyExc_ValueError, "allowed tokens have %zd bytes, the vocabulary %lld tokens",
               allowed.len, static_cast<long long>(n_vocab));
  return false;
}

bool read_row(PyObject *object, const float *scores, int64_t n_vocab, Row &row) {
  PyObject *biases, *penalties, *allowed;
  DrawCall &draw = row.draw;
  long long top_k;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "a row is a tuple of eight");
    return false;
  }
  if (!PyArg_ParseTuple(object, "fdLddOOO", &draw.scale, &draw.min_p_gap, &top_k, &draw.top_p,
                        &draw.die, &biases, &penalties, &allowed))
    return false;
  draw.scores = scores;
  draw.n_vocab = n_vocab;
  draw.top_k = top_k;
  if (!(draw.scale >= 0 && std::isfinite(draw.scale)) || !(draw.min_p_gap <= 0) || top_k < 0 ||
      !(draw.top_p > 0) || !(draw.die >= 0 && draw.die < 1)) {
    PyErr_SetString(PyExc_ValueError,
                    "a row has a scale that is negative or not finite, a gap or a top-k of the "
                    "wrong sign, a top-p that is not above 0, or a die outside [0, 1)");
    return false;
  }
  return (biases == Py_None || read_biases(biases, n_vocab, row.changes)) &&
         (penalties == Py_None || read_penalties(penalties, n_vocab, row.changes)) &&
         (allowed == Py_None || read_allowed(allowed, n_vocab, row.allowed));
}

// Zeros of the calling thread, that stay zeros between calls.
uint32_t *zeros(int64_t n) {
  struct Zeros {
    uint32_t *data = nullptr;
    int64_t n = 0;
    ~Zeros() { free(data); }
  };
  static thread_local Zeros own;
  if (own.n < n) {
    free(own.data);
    own.data = static_cast<uint32_t *>(calloc(static_cast<size_t>(n), 4));
    if (!own.data)
      abort();
    own.n = n;
  }
  return own.data;
}

void choose(Row &row, float *scores) {
  const ScoreChanges &changes = row.changes;
  DrawCall draw = row.draw;
  int64_t n_changed = changes.n_biased + changes.n_history, n = draw.n_vocab;
  int64_t n_copied = row.allowed.obj ? n : 0;
  char *memory = nullptr;
  ChangedScores before{};
  if (n_changed > 0 || n_copied > 0)
    memory = static_cast<char *>(scratch(ScratchSlot::changes,
                                         static_cast<size_t>(n_copied + 2 * n_changed) * 4));
  if (n_changed > 0) {
    before.scores = reinterpret_cast<float *>(memory) + n_copied;
    before.tokens = reinterpret_cast<int32_t *>(before.scores + n_changed);
    change_scores(changes, scores, zeros(n), before);
  }
  if (n_copied > 0) {
    float *copy = reinterpret_cast<float *>(memory);
    const char *allowed = static_cast<const char *>(row.allowed.buf);
    for (int64_t i = 0; i < n; ++i)
      copy[i] = allowed[i] ? scores[i] : -INFINITY;
    draw.scores = copy;
  }
  row.token = kernels->draw_token(draw);
  restore_scores(before, scores);
}

} // namespace

PyObject *choose_tokens(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"scores", "n_vocab", "rows", nullptr};
  PyObject *scores, *row_objects;
  long long n_vocab;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLO", const_cast<char **>(names), &scores,
                                   &n_vocab, &row_objects) ||
      !check_vocabulary(n_vocab))
    return nullptr;
  Items items(row_objects);
  if (!items.object)
    return nullptr;
  Rows rows(items.n());
  if (!rows.all)
    return PyErr_NoMemory();
  Buffer data;
  if (!data.take(scores, "scores", product(product(rows.n, n_vocab), 4), true))
    return nullptr;
  for (int64_t i = 0; i < rows.n; ++i)
    if (!read_row(items[i], data.as<float>() + i * n_vocab, n_vocab, rows.all[i]))
      return nullptr;
  Py_BEGIN_ALLOW_THREADS
  parallel_for(rows.n, [&](int64_t i, int) { choose(rows.all[i], data.as<float>() + i * n_vocab); });
  Py_END_ALLOW_THREADS
  PyObject *tokens = PyList_New(rows.n);
  for (int64_t i = 0; tokens && i < rows.n; ++i) {
    PyObject *token = PyLong_FromLongLong(rows.all[i].token);
    if (!token) {
      Py_DECREF(tokens);
      return nullptr;
    }
    PyList_SET_ITEM(tokens, i, token);
  }
  return tokens;
}

namespace {

// Make (log probability, rank, ((token, log probability), …)).
PyObject *result_of(const ScoreCall &call) {
  PyObject *top = PyTuple_New(call.n_top);
  for (int64_t i = 0; top && i < call.n_top; ++i) {
    PyObject *each = Py_BuildValue("Ld", static_cast<long long>(call.top[i].token),
                                   call.top[i].logprob);
    if (!each) {
      Py_DECREF(top);
      return nullptr;
    }
    PyTuple_SET_ITEM(top, i, each);
  }
  return top ? Py_BuildValue("dLN", call.logprob, static_cast<long long>(call.rank), top) : nullptr;
}

struct Scored {
  ScoreCall *calls;
  bool *known;
  TokenLogprob *top;

  ~Scored() {
    free(calls);
    free(known);
    free(top);
  }
};

} // namespace

PyObject *score_tokens(PyObject *, PyObject *args, PyObject *kwargs) {
  static const char *names[] = {"scores", "n_vocab", "tokens", "n_top", nullptr};
  PyObject *scores, *token_objects;
  long long n_vocab, n_top;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLOL", const_cast<char **>(names), &scores,
                                   &n_vocab, &token_objects, &n_top) ||
      !check_vocabulary(n_vocab))
    return nullptr;
  Items items(token_objects);
  if (!items.object)
    return nullptr;
  int64_t n = items.n();
  Buffer data;
  if (!data.take(scores, "scores", product(product(n, n_vocab), 4), false))
    return nullptr;
  if (n_top < 0) {
    PyErr_Format(PyExc_ValueError, "%lld likeliest tokens; 0 or more are possible", n_top);
    return nullptr;
  }
  n_top = n_top < n_vocab ? n_top : n_vocab;
  Scored rows{room_for<ScoreCall>(n), room_for<bool>(n), room_for<TokenLogprob>(n * n_top)};
  if (!rows.calls || !rows.known || !rows.top)
    return nullptr;
  for (int64_t i = 0; i < n; ++i) {
    int32_t token;
    if (!read_token(items[i], n_vocab, &token))
      return nullptr;
    rows.calls[i] = {data.as<float>() + i * n_vocab, n_vocab, token, n_top, 0, 0,
                     rows.top + i * n_top};
  }
  Py_BEGIN_ALLOW_THREADS
  parallel_for(n, [&](int64_t i, int) { rows.known[i] = kernels->score_token(rows.calls[i]); });
  Py_END_ALLOW_THREADS
  PyObject *results = PyList_New(n);
  for (int64_t i = 0; results && i < n; ++i) {
    PyObject *result = rows.known[i] ? result_of(rows.calls[i]) : Py_NewRef(Py_None);
    if (!result) {
      Py_DECREF(results);
      return nullptr;
    }
    PyList_SET_ITEM(results, i, result);
  }
  return results;
}

} // namespace halfmoon
