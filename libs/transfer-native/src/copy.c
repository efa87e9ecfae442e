/* A batch of slices between local memory and a mapped region, in one call.
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
} Copied;

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

PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    int write;
    PyObject *slices, *locals, *memory;
    if (!PyArg_ParseTuple(args, "pO!O!O", &write, &PyTuple_Type, &slices, &PyTuple_Type, &locals, &memory))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(slices);
    if (PyTuple_GET_SIZE(locals) != n || n > MAX_BATCH_SLICES) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not go together");
        return NULL;
    }
    Py_buffer remote;
    if (PyObject_GetBuffer(memory, &remote, write ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = NULL;
    size_t n_copied = 0;
    uint64_t n_bytes = 0;
    bool within = true;
    Copied *copied = PyMem_RawMalloc((size_t)(n > 0 ? n : 1) * sizeof *copied);
    if (copied == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    while (n_copied < (size_t)n) {
        Copied *each = &copied[n_copied];
        PyObject *offset = PyObject_GetAttr(PyTuple_GET_ITEM(slices, n_copied), name_remote_offset);
        if (offset == NULL)
            goto done;
        each->offset = PyLong_AsUnsignedLongLong(offset);
        Py_DECREF(offset);
        if (PyErr_Occurred())
            goto done;
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(locals, n_copied), &each->local, write ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto done;
        n_copied++;
        uint64_t length = (uint64_t)each->local.len, there = (uint64_t)remote.len;
        within = within && length <= there && each->offset <= there - length;
        n_bytes += length;
    }
    if (within) {
        Py_BEGIN_ALLOW_THREADS
        copy_all(copied, n_copied, remote.buf, write, write && n_bytes >= PAST_CACHES_BYTES);
        Py_END_ALLOW_THREADS
    }
    result = PyBool_FromLong(within);
done:
    while (n_copied > 0)
        PyBuffer_Release(&copied[--n_copied].local);
    PyMem_RawFree(copied);
    PyBuffer_Release(&remote);
    return result;
}

int copy_init(void)
{
    name_remote_offset = PyUnicode_InternFromString("remote_offset");
    return name_remote_offset == NULL ? -1 : 0;
}
