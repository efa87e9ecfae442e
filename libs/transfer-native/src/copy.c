/* A batch of slices between local memory and a mapped region, in one call: copied, or compared.
 *
 * All bounds are checked before the first byte is copied. Bytes that are written for another process
 * go past the caches where they are many: the line that is written need not be read first, and what
 * this process computes with stays in the cache.
 */
#include "copy.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

enum { MAX_BATCH_SLICES = 65536, PAST_CACHES_BYTES = 4 * 1024 * 1024, LINE_BYTES = 64 };

typedef struct {
    Py_buffer local;
    uint64_t offset;
    bool differs;
} Copied;

typedef struct {
    Py_buffer remote;
    Copied *slices;
    size_t n;
    uint64_t n_bytes;
    /* Whether all slices are within the region's bounds. */
    bool within;
} Batch;

static PyObject *name_remote_offset;

static void copy_past_caches(uint8_t *to, const uint8_t *from, size_t n)
{
#ifdef __x86_64__
    size_t head = (LINE_BYTES - (uintptr_t)to % LINE_BYTES) % LINE_BYTES;
    if (n < 4 * LINE_BYTES + head) {
        memmove(to, from, n);
        return;
    }
    memmove(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= LINE_BYTES; to += LINE_BYTES, from += LINE_BYTES, n -= LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1),
                c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memmove(to, from, n);
#else
    memmove(to, from, n);
#endif
}

static void copy_all(const Copied *copied, size_t n, uint8_t *remote, bool write, bool past_caches)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t *local = copied[i].local.buf, *there = remote + copied[i].offset;
        size_t n_bytes = (size_t)copied[i].local.len;
        if (past_caches)
            copy_past_caches(there, local, n_bytes);
        else
            memmove(write ? there : local, write ? local : there, n_bytes);
    }
#ifdef __x86_64__
    if (past_caches)
        _mm_sfence(); /* before anyone is told that the bytes are there */
#endif
}

static void close_batch(Batch *batch)
{
    while (batch->n > 0)
        PyBuffer_Release(&batch->slices[--batch->n].local);
    PyMem_RawFree(batch->slices);
    PyBuffer_Release(&batch->remote);
}

/* Take the memory of a batch; false with a Python error set, and nothing to close. */
static bool open_batch(Batch *batch, PyObject *slices, PyObject *locals, PyObject *memory, int local_access, int remote_access)
{
    Py_ssize_t n = PyTuple_GET_SIZE(slices);
    if (PyTuple_GET_SIZE(locals) != n || n > MAX_BATCH_SLICES) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not go together");
        return false;
    }
    *batch = (Batch){.within = true};
    if (PyObject_GetBuffer(memory, &batch->remote, remote_access) < 0)
        return false;
    batch->slices = PyMem_RawMalloc((size_t)(n > 0 ? n : 1) * sizeof *batch->slices);
    if (batch->slices == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    while (batch->n < (size_t)n) {
        Copied *each = &batch->slices[batch->n];
        PyObject *offset = PyObject_GetAttr(PyTuple_GET_ITEM(slices, batch->n), name_remote_offset);
        if (offset == NULL)
            goto failed;
        each->offset = PyLong_AsUnsignedLongLong(offset);
        Py_DECREF(offset);
        if (PyErr_Occurred())
            goto failed;
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(locals, batch->n), &each->local, local_access) < 0)
            goto failed;
        batch->n++;
        uint64_t length = (uint64_t)each->local.len, there = (uint64_t)batch->remote.len;
        batch->within = batch->within && length <= there && each->offset <= there - length;
        batch->n_bytes += length;
    }
    return true;
failed:
    close_batch(batch);
    return false;
}

PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    int write;
    PyObject *slices, *locals, *memory;
    if (!PyArg_ParseTuple(args, "pO!O!O", &write, &PyTuple_Type, &slices, &PyTuple_Type, &locals, &memory))
        return NULL;
    Batch batch;
    if (!open_batch(&batch, slices, locals, memory, write ? PyBUF_SIMPLE : PyBUF_WRITABLE, write ? PyBUF_WRITABLE : PyBUF_SIMPLE))
        return NULL;
    if (batch.within) {
        Py_BEGIN_ALLOW_THREADS
        copy_all(batch.slices, batch.n, batch.remote.buf, write, write && batch.n_bytes >= PAST_CACHES_BYTES);
        Py_END_ALLOW_THREADS
    }
    close_batch(&batch);
    return PyBool_FromLong(batch.within);
}

PyObject *differing(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *slices, *locals, *memory;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &slices, &PyTuple_Type, &locals, &memory))
        return NULL;
    Batch batch;
    if (!open_batch(&batch, slices, locals, memory, PyBUF_SIMPLE, PyBUF_SIMPLE))
        return NULL;
    PyObject *found = NULL;
    if (!batch.within) {
        PyErr_SetString(PyExc_ValueError, "a slice out of the region's bounds");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < batch.n; i++) {
        const Copied *each = &batch.slices[i];
        size_t n_bytes = (size_t)each->local.len;
        batch.slices[i].differs = memcmp((uint8_t *)batch.remote.buf + each->offset, each->local.buf, n_bytes) != 0;
    }
    Py_END_ALLOW_THREADS
    found = PyList_New(0);
    for (size_t i = 0; found != NULL && i < batch.n; i++) {
        if (!batch.slices[i].differs)
            continue;
        PyObject *index = PyLong_FromSize_t(i);
        if (index == NULL || PyList_Append(found, index) < 0)
            Py_CLEAR(found);
        Py_XDECREF(index);
    }
done:
    close_batch(&batch);
    return found;
}

int copy_init(void)
{
    name_remote_offset = PyUnicode_InternFromString("remote_offset");
    return name_remote_offset == NULL ? -1 : 0;
}
