/* Whole buffers in and out of a blocking socket, in as few system calls as can be. */
#include "records.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Let Python's signal handlers run, in the thread that may run them. */
static End handle_signals(Wire *wire)
{
    if (wire->thread == NULL)
        return DONE;
    PyEval_RestoreThread(wire->thread);
    int failed = PyErr_CheckSignals();
    wire->thread = PyEval_SaveThread();
    return failed ? INTERRUPTED : DONE;
}

/* The error after a timeout: one that is more than idling if it came in the middle of a record. */
static End stalled(const Wire *wire)
{
    bool idle = errno != EAGAIN && errno != EWOULDBLOCK;
    if (!idle && wire->records != NULL && records_in_the_middle(wire->records))
        errno = ETIMEDOUT;
    return FAILED;
}

static End receive_some(Wire *wire, struct iovec *buffers, size_t n_buffers, int flags, double spin_s,
                        size_t *n_received)
{
    struct msghdr message = {.msg_iov = buffers, .msg_iovlen = n_buffers};
    struct iovec room;
    double until_s = spin_s > 0 ? now_s() + spin_s : 0;
    for (;;) {
        if (wire->records != NULL) {
            End end = records_take(wire->records, buffers, n_buffers, n_received);
            if (end != UNUSUAL)
                return end;
            room = records_room(wire->records);
            message = (struct msghdr){.msg_iov = &room, .msg_iovlen = 1};
            flags = 0;
        }
        ssize_t n = recvmsg(wire->fd, &message, until_s > 0 ? MSG_DONTWAIT : flags);
        if (n > 0 && wire->records != NULL) {
            records_arrived(wire->records, (size_t)n);
            continue;
        }
        if (n > 0) {
            *n_received += (size_t)n;
            return DONE;
        }
        if (n == 0)
            return wire->records != NULL && records_in_the_middle(wire->records) ? HUNG_UP : UNUSUAL;
        if (until_s > 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            /* The peer may need this very processor. */
            sched_yield();
            if (now_s() >= until_s)
                until_s = 0;
            continue;
        }
        if (errno != EINTR)
            return stalled(wire);
        End end = handle_signals(wire);
        if (end != DONE)
            return end;
    }
}

End wire_receive(Wire *wire, struct iovec *buffers, size_t n_buffers, size_t *n_received)
{
    return receive_some(wire, buffers, n_buffers, 0, 0, n_received);
}

/* Step over `n_bytes` that are done; the index of the first buffer that is not. */
static size_t advance(struct iovec *buffers, size_t first, size_t n_buffers, size_t n_bytes)
{
    while (first < n_buffers && n_bytes >= buffers[first].iov_len)
        n_bytes -= buffers[first++].iov_len;
    if (n_bytes > 0) {
        buffers[first].iov_base = (uint8_t *)buffers[first].iov_base + n_bytes;
        buffers[first].iov_len -= n_bytes;
    }
    return first;
}

static size_t at_most(size_t count, size_t limit) { return count < limit ? count : limit; }

End wire_have(Wire *wire, size_t n_bytes)
{
    if (wire->end - wire->start >= n_bytes)
        return DONE;
    memmove(wire->ahead, wire->ahead + wire->start, wire->end - wire->start);
    wire->end -= wire->start;
    wire->start = 0;
    while (wire->end < n_bytes) {
        struct iovec rest = {.iov_base = wire->ahead + wire->end, .iov_len = wire->n_ahead - wire->end};
        End end = receive_some(wire, &rest, 1, 0, wire->end == 0 ? wire->spin_s : 0, &wire->end);
        if (end != DONE)
            return end;
    }
    return DONE;
}

End wire_fill(Wire *wire, struct iovec *buffers, size_t n_buffers)
{
    size_t first = 0;
    while (first < n_buffers && wire->start < wire->end) {
        size_t n = at_most(buffers[first].iov_len, wire->end - wire->start);
        memcpy(buffers[first].iov_base, wire->ahead + wire->start, n);
        wire->start += n;
        first = advance(buffers, first, n_buffers, n);
    }
    while (first < n_buffers) {
        size_t n_received = 0;
        End end = receive_some(wire, buffers + first, at_most(n_buffers - first, MAX_BUFFERS), MSG_WAITALL, 0,
                               &n_received);
        if (end != DONE)
            return end == UNUSUAL ? HUNG_UP : end;
        first = advance(buffers, first, n_buffers, n_received);
        /* Less than was asked for may mean a signal, whose handler wants to run. */
        if (first < n_buffers && wire->records == NULL && (end = handle_signals(wire)) != DONE)
            return end;
    }
    return DONE;
}

/* Send all of these as they are. */
static End send_plain(Wire *wire, struct iovec *buffers, size_t n_buffers)
{
    size_t first = 0;
    while (first < n_buffers) {
        struct msghdr message = {.msg_iov = buffers + first, .msg_iovlen = at_most(n_buffers - first, MAX_BUFFERS)};
        ssize_t n_sent = sendmsg(wire->fd, &message, MSG_NOSIGNAL);
        if (n_sent >= 0) {
            first = advance(buffers, first, n_buffers, (size_t)n_sent);
            continue;
        }
        if (errno != EINTR)
            return FAILED;
        End end = handle_signals(wire);
        if (end != DONE)
            return end;
    }
    return DONE;
}

End wire_send(Wire *wire, struct iovec *buffers, size_t n_buffers)
{
    if (wire->records == NULL)
        return send_plain(wire, buffers, n_buffers);
    End end = DONE;
    for (size_t first = 0; end == DONE && first < n_buffers;) {
        if (buffers[first].iov_len == 0) {
            first++;
            continue;
        }
        struct iovec sealed;
        end = records_seal(wire->records, buffers, n_buffers, &first, &sealed);
        if (end == DONE)
            end = send_plain(wire, &sealed, 1);
    }
    return end;
}

/* Set an OSError like that of `record_layer.broken_seal`. */
static void raise_tampered(const Wire *wire)
{
    PyObject *text = PyUnicode_FromFormat("encrypted record %llu is not as its sender sealed it: "
                                          "changed, repeated or lost in transit",
                                          (unsigned long long)records_n_opened(wire->records));
    PyObject *args = text == NULL ? NULL : Py_BuildValue("iN", EBADMSG, text);
    if (args != NULL)
        PyErr_SetObject(PyExc_OSError, args);
    Py_XDECREF(args);
}

void wire_raise(const Wire *wire, End end)
{
    if (end == HUNG_UP)
        PyErr_SetString(PyExc_ConnectionError, "the peer hung up in the middle");
    else if (end == TAMPERED)
        raise_tampered(wire);
    else if (end == FAILED)
        PyErr_SetFromErrno(PyExc_OSError);
}
