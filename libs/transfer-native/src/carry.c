/* The initiator: a batch of slices as a few requests, and their replies, in one call.
 *
 * Requests are sent ahead of their replies, as the lane in Python does, which also says how
 * large they are. A part is summed right before it is sent, while it is in the cache. A reply
 * in which anything is unusual is left where it is, for Python to go on from there.
 */
#include "carry.h"
#include "records.h"

#include <errno.h>

enum { MAX_FRAME_SLICES = 1024, MAX_WINDOW = 16, MAX_BATCH_SLICES = 65536 };
/* What became of a slice; 0 while nothing is known. */
enum { APPLIED = 1, DAMAGED = 2 };

typedef struct {
    uint8_t key[KEY_BYTES];
    uint64_t offset;
    Py_buffer local;
} Wanted;

/* The slices of one request. */
typedef struct {
    size_t first;
    size_t n;
} Part;

typedef struct {
    Wire wire;
    bool write;
    bool sums;
    /* Of the first request. */
    uint64_t number;
    uint64_t generation;
    size_t frame_bytes;
    size_t frame_slices;
    size_t window;
    size_t n_wanted;
    Wanted *wanted;
    uint8_t *marks;
    /* Requests sent, and replies taken; the slices that come next. */
    size_t n_sent, n_answered;
    size_t next_to_send;
    struct iovec buffers[MAX_FRAME_SLICES + 1];
    uint8_t head[HEADER_BYTES + MAX_FRAME_SLICES * ASKED_BYTES + SUM_BYTES];
} Batch;

static Part next_part(const Batch *batch)
{
    Part part = {batch->next_to_send, 0};
    size_t n_bytes = 0;
    for (size_t i = part.first; i < batch->n_wanted && part.n < batch->frame_slices; i++, part.n++) {
        n_bytes += (size_t)batch->wanted[i].local.len;
        if (part.n > 0 && n_bytes > batch->frame_bytes)
            break;
    }
    return part;
}

static End send_part(Batch *batch, Part part)
{
    size_t n_head = HEADER_BYTES + part.n * ASKED_BYTES;
    put_header(batch->head, "HMTQ", batch->write ? WRITE : READ, part.n, batch->sums ? CHECKSUMS : 0,
               batch->number + batch->n_sent, batch->generation);
    for (size_t i = 0; i < part.n; i++) {
        Wanted *each = &batch->wanted[part.first + i];
        uint8_t *at = batch->head + HEADER_BYTES + i * ASKED_BYTES;
        memcpy(at, each->key, KEY_BYTES);
        put64(at + 16, each->offset);
        put32(at + 24, (uint32_t)each->local.len);
        put32(at + 28, 0);
        put64(at + 32, batch->write && batch->sums ? sum_of(each->local.buf, (size_t)each->local.len) : 0);
        batch->buffers[i + 1] = (struct iovec){each->local.buf, (size_t)each->local.len};
    }
    put64(batch->head + n_head, sum_of(batch->head, n_head));
    batch->buffers[0] = (struct iovec){batch->head, n_head + SUM_BYTES};
    return wire_send(&batch->wire, batch->buffers, batch->write ? part.n + 1 : 1);
}

/* Take a reply that says that all is well, and its bytes; leave any other. */
static End receive_part(Batch *batch, Part part)
{
    Wire *wire = &batch->wire;
    size_t n_head = HEADER_BYTES + part.n * ANSWERED_BYTES + SUM_BYTES;
    End end = wire_have(wire, HEADER_BYTES);
    if (end != DONE)
        return end;
    uint8_t expected[HEADER_BYTES];
    put_header(expected, "HMTR", batch->write ? WRITE : READ, part.n, 0, batch->number + batch->n_answered, 0);
    if (memcmp(wire->ahead + wire->start, expected, HEADER_BYTES) != 0 || n_head > wire->n_ahead)
        return UNUSUAL;
    end = wire_have(wire, n_head);
    if (end != DONE)
        return end;
    const uint8_t *head = wire->ahead + wire->start;
    if (!head_is_whole(head, n_head))
        return UNUSUAL;
    uint64_t sums[MAX_FRAME_SLICES];
    for (size_t i = 0; i < part.n; i++) {
        const uint8_t *answered = head + HEADER_BYTES + i * ANSWERED_BYTES;
        if (answered[0] != STATUS_OK)
            return UNUSUAL;
        sums[i] = get64(answered + 8);
    }
    wire->start += n_head;
    if (batch->write) {
        memset(batch->marks + part.first, APPLIED, part.n);
        return DONE;
    }
    for (size_t i = 0; i < part.n;) {
        size_t first = i, n_bytes = 0;
        while (i < part.n && (i == first || n_bytes < HOT_BYTES)) {
            Py_buffer *local = &batch->wanted[part.first + i].local;
            batch->buffers[i - first] = (struct iovec){local->buf, (size_t)local->len};
            n_bytes += (size_t)local->len;
            i++;
        }
        end = wire_fill(wire, batch->buffers, i - first);
        if (end != DONE)
            return end;
        for (size_t j = first; j < i; j++) {
            Py_buffer *local = &batch->wanted[part.first + j].local;
            bool same = !batch->sums || sum_of(local->buf, (size_t)local->len) == sums[j];
            batch->marks[part.first + j] = same ? APPLIED : DAMAGED;
        }
    }
    return DONE;
}

/* After sending failed: leave for Python what the peer said before it hung up, if it said anything.
 * Returns FAILED, with errno as it was, if it did not. */
static End hear_last_words(Batch *batch, const Part *waiting)
{
    int error = errno;
    if (batch->write && (error == EPIPE || error == ECONNRESET))
        for (; batch->n_answered < batch->n_sent; batch->n_answered++) {
            End end = receive_part(batch, waiting[batch->n_answered % MAX_WINDOW]);
            if (end == UNUSUAL)
                return UNUSUAL;
            if (end != DONE)
                break;
        }
    errno = error;
    return FAILED;
}

static End move(Batch *batch)
{
    Part waiting[MAX_WINDOW];
    for (;;) {
        bool more = batch->next_to_send < batch->n_wanted;
        if (!more && batch->n_answered == batch->n_sent)
            return DONE;
        End end;
        if (more && batch->n_sent - batch->n_answered < batch->window) {
            Part part = next_part(batch);
            end = send_part(batch, part);
            waiting[batch->n_sent++ % MAX_WINDOW] = part;
            batch->next_to_send += part.n;
            if (end == FAILED)
                end = hear_last_words(batch, waiting);
        } else {
            end = receive_part(batch, waiting[batch->n_answered % MAX_WINDOW]);
            if (end == DONE)
                batch->n_answered++;
        }
        if (end != DONE)
            return end;
    }
}

/* From Python's objects. */

static PyObject *name_remote, *name_remote_offset, *name_key;

/* Take over one slice: something with `remote` and `remote_offset`, and its bytes here. */
static int want(Wanted *wanted, PyObject *slice, PyObject *local, bool write)
{
    PyObject *remote = NULL, *key = NULL, *offset = NULL;
    int result = -1;
    if ((remote = PyObject_GetAttr(slice, name_remote)) == NULL || (key = PyObject_GetAttr(remote, name_key)) == NULL ||
        (offset = PyObject_GetAttr(slice, name_remote_offset)) == NULL)
        goto done;
    wanted->offset = PyLong_AsUnsignedLongLong(offset);
    if (wanted->offset == (uint64_t)-1 && PyErr_Occurred())
        goto done;
    if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key that is not %d bytes", KEY_BYTES);
        goto done;
    }
    memcpy(wanted->key, PyBytes_AS_STRING(key), KEY_BYTES);
    if (PyObject_GetBuffer(local, &wanted->local, write ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        goto done;
    if (wanted->local.len < 1 || wanted->local.len > MAX_SLICE_BYTES) {
        PyErr_Format(PyExc_ValueError, "a slice of %zd bytes, allowed are 1 to %d", wanted->local.len, MAX_SLICE_BYTES);
        PyBuffer_Release(&wanted->local);
        goto done;
    }
    result = 0;
done:
    Py_XDECREF(remote);
    Py_XDECREF(key);
    Py_XDECREF(offset);
    return result;
}

PyObject *carry(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd, write, sums;
    Records *records;
    Py_buffer ahead, marks;
    Py_ssize_t start, end, frame_bytes, frame_slices, window;
    double spin_s;
    unsigned long long number, generation;
    PyObject *slices, *locals;
    if (!PyArg_ParseTuple(args, "iO&w*nndppKKO!O!w*(nnn)", &fd, records_or_none, &records, &ahead, &start, &end, &spin_s, &write, &sums, &number,
                          &generation, &PyTuple_Type, &slices, &PyTuple_Type, &locals, &marks, &frame_bytes,
                          &frame_slices, &window))
        return NULL;
    PyObject *result = NULL;
    Batch *batch = NULL;
    Wanted *wanted = NULL;
    size_t n_wanted = 0;
    Py_ssize_t n = PyTuple_GET_SIZE(slices);
    if (start < 0 || end < start || ahead.len < end || ahead.len < HEADER_BYTES || n > MAX_BATCH_SLICES ||
        PyTuple_GET_SIZE(locals) != n || marks.len != n || frame_bytes < 1 || frame_slices < 1 ||
        frame_slices > MAX_FRAME_SLICES || window < 1 || window > MAX_WINDOW) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not go together");
        goto done;
    }
    batch = PyMem_RawMalloc(sizeof *batch);
    wanted = PyMem_RawMalloc((size_t)(n > 0 ? n : 1) * sizeof *wanted);
    if (batch == NULL || wanted == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; n_wanted < (size_t)n; n_wanted++)
        if (want(&wanted[n_wanted], PyTuple_GET_ITEM(slices, n_wanted), PyTuple_GET_ITEM(locals, n_wanted), write) < 0)
            goto done;
    batch->wire = (Wire){fd, records, spin_s, NULL, ahead.buf, (size_t)ahead.len, (size_t)start, (size_t)end};
    batch->write = write;
    batch->sums = sums;
    batch->number = number;
    batch->generation = generation;
    batch->frame_bytes = (size_t)frame_bytes;
    batch->frame_slices = (size_t)frame_slices;
    batch->window = (size_t)window;
    batch->n_wanted = n_wanted;
    batch->wanted = wanted;
    batch->marks = marks.buf;
    batch->n_sent = batch->n_answered = batch->next_to_send = 0;
    batch->wire.thread = PyEval_SaveThread();
    End how = move(batch);
    int error = errno;
    PyEval_RestoreThread(batch->wire.thread);
    errno = error;
    if (how == DONE || how == UNUSUAL)
        result = Py_BuildValue("nnnn", (Py_ssize_t)batch->wire.start, (Py_ssize_t)batch->wire.end,
                               (Py_ssize_t)batch->n_sent, (Py_ssize_t)batch->n_answered);
    else
        wire_raise(&batch->wire, how);
done:
    while (n_wanted > 0)
        PyBuffer_Release(&wanted[--n_wanted].local);
    PyMem_RawFree(wanted);
    PyMem_RawFree(batch);
    PyBuffer_Release(&marks);
    PyBuffer_Release(&ahead);
    return result;
}

int carry_init(void)
{
    name_remote = PyUnicode_InternFromString("remote");
    name_remote_offset = PyUnicode_InternFromString("remote_offset");
    name_key = PyUnicode_InternFromString("key");
    return name_remote == NULL || name_remote_offset == NULL || name_key == NULL ? -1 : 0;
}
