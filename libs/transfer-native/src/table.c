/* The owner: a table of regions in memory, and a loop that serves one connection from it.
 *
 * The loop answers reads and writes in which everything is allowed. Whatever else comes (another
 * op, a key that is not in the table, an access out of bounds, what is no frame at all) is left
 * where it is, untouched, for Python to look at: refusals and complaints are made there, once.
 *
 * An access counts as a lease on its region, from before its bytes are touched until the reply is
 * sent. A region that is removed is found by nobody any more; its memory is let go of when its
 * last lease has ended, so no byte is ever written to memory that somebody else has by then.
 *
 * The mutex guards the table and all counts. Whoever holds it does nothing that could wait: no
 * system call on a socket, no Python.
 */
#include "table.h"
#include "records.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <time.h>

enum { N_BUCKETS = 4096, SMALL_BYTES = 64 * 1024 };

typedef struct Entry {
    struct Entry *next;
    uint8_t key[KEY_BYTES];
    Py_buffer buffer;
    /* Accesses going on. */
    size_t n_leases;
} Entry;

/* One slice of the request that is being answered. */
typedef struct {
    Entry *entry;
    uint8_t *bytes;
    uint32_t n_bytes;
    uint64_t sum;
} Access;

/* One connection while it is being served. */
typedef struct Server {
    struct Server *next;
    Wire wire;
    /* The first `n_accesses` hold a lease each. */
    size_t n_accesses;
    Access accesses[MAX_SLICES];
    struct iovec buffers[MAX_SLICES + 1];
    uint8_t reply[HEADER_BYTES + MAX_SLICES * ANSWERED_BYTES + SUM_BYTES];
} Server;

typedef struct {
    PyObject_HEAD
    uint64_t generation;
    pthread_mutex_t lock;
    /* Told of the end of a removed region's last lease. */
    pthread_cond_t quiet;
    Entry *buckets[N_BUCKETS];
    /* No longer found, and perhaps still accessed. */
    Entry *removed;
    Server *servers;
} Table;

/* Keys are random, so any of their bytes are as good as a hash. */
static Entry **place_of(Table *table, const uint8_t *key)
{
    Entry **place = &table->buckets[get16(key) % N_BUCKETS];
    while (*place != NULL && memcmp((*place)->key, key, KEY_BYTES) != 0)
        place = &(*place)->next;
    return place;
}

/* Let go of removed regions that nobody accesses. Needs the interpreter, and not the lock. */
static void reap(Table *table)
{
    Entry *quiet = NULL;
    pthread_mutex_lock(&table->lock);
    for (Entry **place = &table->removed; *place != NULL;) {
        Entry *entry = *place;
        if (entry->n_leases > 0) {
            place = &entry->next;
            continue;
        }
        *place = entry->next;
        entry->next = quiet;
        quiet = entry;
    }
    pthread_mutex_unlock(&table->lock);
    while (quiet != NULL) {
        Entry *entry = quiet;
        quiet = entry->next;
        PyBuffer_Release(&entry->buffer);
        PyMem_RawFree(entry);
    }
}

/* Leases. */

/* Take a lease for each slice of a request, or none: whether all of them are allowed. */
static bool lease(Table *table, Server *server, const uint8_t *head, size_t n_slices, bool write)
{
    bool allowed = true;
    size_t n = 0;
    pthread_mutex_lock(&table->lock);
    for (; n < n_slices; n++) {
        const uint8_t *asked = head + HEADER_BYTES + n * ASKED_BYTES;
        uint64_t offset = get64(asked + 16);
        uint32_t n_bytes = get32(asked + 24);
        Entry *entry = *place_of(table, asked);
        if (entry == NULL || (write && entry->buffer.readonly) || n_bytes > (uint64_t)entry->buffer.len ||
            offset > (uint64_t)entry->buffer.len - n_bytes) {
            allowed = false;
            break;
        }
        server->accesses[n] = (Access){entry, (uint8_t *)entry->buffer.buf + offset, n_bytes, get64(asked + 32)};
        entry->n_leases++;
    }
    server->n_accesses = n;
    pthread_mutex_unlock(&table->lock);
    return allowed;
}

static void give_back(Table *table, Server *server)
{
    pthread_mutex_lock(&table->lock);
    for (size_t i = 0; i < server->n_accesses; i++)
        server->accesses[i].entry->n_leases--;
    server->n_accesses = 0;
    if (table->removed != NULL)
        pthread_cond_broadcast(&table->quiet);
    pthread_mutex_unlock(&table->lock);
}

/* Serving. */

/* The length of the next head, or 0 if Python shall look at what is ahead. */
static size_t usual_head_bytes(const uint8_t *header)
{
    size_t n_slices = get16(header + 6);
    bool usual = memcmp(header, "HMTQ", 4) == 0 && header[4] == VERSION &&
                 (header[5] == READ || header[5] == WRITE) && (get32(header + 8) & ~(uint32_t)CHECKSUMS) == 0 &&
                 n_slices >= 1 && n_slices <= MAX_SLICES;
    return usual ? HEADER_BYTES + n_slices * ASKED_BYTES + SUM_BYTES : 0;
}

/* The length of all slices, or 0 if that is too much. */
static size_t bytes_within_limits(const uint8_t *head, size_t n_slices)
{
    size_t total = 0;
    for (size_t i = 0; i < n_slices; i++) {
        uint32_t n_bytes = get32(head + HEADER_BYTES + i * ASKED_BYTES + 24);
        if (n_bytes < 1 || n_bytes > MAX_SLICE_BYTES)
            return 0;
        total += n_bytes;
    }
    return total <= MAX_FRAME_BYTES ? total : 0;
}

static void answer(Server *server, size_t index, int status, uint64_t detail)
{
    uint8_t *at = server->reply + HEADER_BYTES + index * ANSWERED_BYTES;
    memset(at, 0, ANSWERED_BYTES);
    at[0] = (uint8_t)status;
    put64(at + 8, detail);
}

/* Complete the reply's head; its length. */
static size_t finish_reply(Server *server, int op, uint64_t number)
{
    size_t n_bytes = HEADER_BYTES + server->n_accesses * ANSWERED_BYTES;
    put_header(server->reply, "HMTR", op, server->n_accesses, 0, number, 0);
    put64(server->reply + n_bytes, sum_of(server->reply, n_bytes));
    return n_bytes + SUM_BYTES;
}

/* Read the slices' bytes into place, check them while they are in the cache, acknowledge. */
static End take(Server *server, uint64_t number, bool sums)
{
    for (size_t i = 0; i < server->n_accesses;) {
        size_t first = i, n_bytes = 0;
        while (i < server->n_accesses && i - first < MAX_BUFFERS && (i == first || n_bytes < HOT_BYTES)) {
            Access *each = &server->accesses[i];
            server->buffers[i - first] = (struct iovec){each->bytes, each->n_bytes};
            n_bytes += each->n_bytes;
            i++;
        }
        End end = wire_fill(&server->wire, server->buffers, i - first);
        if (end != DONE)
            return end;
        for (size_t j = first; j < i; j++) {
            Access *each = &server->accesses[j];
            bool same = !sums || sum_of(each->bytes, each->n_bytes) == each->sum;
            answer(server, j, same ? STATUS_OK : STATUS_CHECKSUM_MISMATCH, 0);
        }
    }
    struct iovec reply = {server->reply, finish_reply(server, WRITE, number)};
    return wire_send(&server->wire, &reply, 1);
}

/* Send the slices' bytes from where they are. */
static End give(Server *server, uint64_t number, bool sums)
{
    for (size_t i = 0; i < server->n_accesses; i++) {
        Access *each = &server->accesses[i];
        answer(server, i, STATUS_OK, sums ? sum_of(each->bytes, each->n_bytes) : 0);
        server->buffers[i + 1] = (struct iovec){each->bytes, each->n_bytes};
    }
    server->buffers[0] = (struct iovec){server->reply, finish_reply(server, READ, number)};
    return wire_send(&server->wire, server->buffers, server->n_accesses + 1);
}

/* Answer requests until something is unusual. Without the interpreter. */
static End serve(Table *table, Server *server, double spin_s)
{
    Wire *wire = &server->wire;
    for (;;) {
        End end = wire_have(wire, HEADER_BYTES);
        if (end == FAILED && (errno == EAGAIN || errno == EWOULDBLOCK) && wire->start == wire->end)
            continue; /* Idling between requests is fine, for as long as the peer likes. */
        if (end != DONE)
            return end;
        size_t n_head = usual_head_bytes(wire->ahead + wire->start);
        if (n_head == 0 || n_head > wire->n_ahead)
            return UNUSUAL;
        end = wire_have(wire, n_head);
        if (end != DONE)
            return end;
        const uint8_t *head = wire->ahead + wire->start;
        size_t n_slices = get16(head + 6);
        bool write = head[5] == WRITE, sums = get32(head + 8) & CHECKSUMS;
        uint64_t number = get64(head + 16);
        size_t n_bytes = head_is_whole(head, n_head) ? bytes_within_limits(head, n_slices) : 0;
        if (n_bytes == 0 || get64(head + 24) != table->generation)
            return UNUSUAL;
        if (!lease(table, server, head, n_slices, write)) {
            give_back(table, server);
            return UNUSUAL;
        }
        wire->start += n_head;
        end = write ? take(server, number, sums) : give(server, number, sums);
        give_back(table, server);
        if (end != DONE)
            return end;
        /* Whoever asked for little may be about to ask again. */
        wire->spin_s = n_bytes <= SMALL_BYTES ? spin_s : 0;
    }
}

static void enter(Table *table, Server *server)
{
    pthread_mutex_lock(&table->lock);
    server->next = table->servers;
    table->servers = server;
    pthread_mutex_unlock(&table->lock);
}

static void leave(Table *table, Server *server)
{
    pthread_mutex_lock(&table->lock);
    Server **place = &table->servers;
    while (*place != server)
        place = &(*place)->next;
    *place = server->next;
    pthread_mutex_unlock(&table->lock);
}

/* What Python sees. */

static PyObject *table_serve(Table *self, PyObject *args)
{
    int fd;
    Records *records;
    Py_buffer ahead;
    Py_ssize_t start, end;
    double spin_s;
    if (!PyArg_ParseTuple(args, "iO&w*nnd", &fd, records_or_none, &records, &ahead, &start, &end, &spin_s))
        return NULL;
    PyObject *result = NULL;
    Server *server = NULL;
    if (start < 0 || end < start || ahead.len < end || ahead.len < HEADER_BYTES) {
        PyErr_SetString(PyExc_ValueError, "what is ahead does not lie in its buffer");
        goto done;
    }
    server = PyMem_RawMalloc(sizeof *server);
    if (server == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    server->n_accesses = 0;
    server->wire = (Wire){fd, records, 0, NULL, ahead.buf, (size_t)ahead.len, (size_t)start, (size_t)end};
    End how;
    int error;
    Py_BEGIN_ALLOW_THREADS
    enter(self, server);
    how = serve(self, server, spin_s);
    error = errno;
    leave(self, server);
    Py_END_ALLOW_THREADS
    errno = error;
    if (how == UNUSUAL)
        result = Py_BuildValue("nn", (Py_ssize_t)server->wire.start, (Py_ssize_t)server->wire.end);
    else
        wire_raise(&server->wire, how);
    reap(self);
done:
    PyMem_RawFree(server);
    PyBuffer_Release(&ahead);
    return result;
}

static PyObject *table_add(Table *self, PyObject *args)
{
    Py_buffer key;
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "y*O", &key, &memory))
        return NULL;
    Entry *entry = NULL;
    if (key.len != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key of %zd bytes, keys have %d", key.len, KEY_BYTES);
        goto failed;
    }
    entry = PyMem_RawCalloc(1, sizeof *entry);
    if (entry == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    if (PyObject_GetBuffer(memory, &entry->buffer, PyBUF_SIMPLE) < 0)
        goto failed;
    memcpy(entry->key, key.buf, KEY_BYTES);
    PyBuffer_Release(&key);
    pthread_mutex_lock(&self->lock);
    Entry **place = place_of(self, entry->key);
    bool known = *place != NULL;
    if (!known)
        *place = entry;
    pthread_mutex_unlock(&self->lock);
    if (known) {
        PyBuffer_Release(&entry->buffer);
        PyMem_RawFree(entry);
    }
    Py_RETURN_NONE;
failed:
    PyMem_RawFree(entry);
    PyBuffer_Release(&key);
    return NULL;
}

/* Whether a removed region is accessed. Under the lock. */
static bool is_accessed(Table *table, const uint8_t *key)
{
    for (Entry *each = table->removed; each != NULL; each = each->next)
        if (memcmp(each->key, key, KEY_BYTES) == 0 && each->n_leases > 0)
            return true;
    return false;
}

static PyObject *table_remove(Table *self, PyObject *args)
{
    const uint8_t *key;
    Py_ssize_t n_key;
    double patience_s;
    if (!PyArg_ParseTuple(args, "y#d", &key, &n_key, &patience_s))
        return NULL;
    if (n_key != KEY_BYTES)
        return PyErr_Format(PyExc_ValueError, "a key of %zd bytes, keys have %d", n_key, KEY_BYTES);
    bool accessed;
    /* `args` keeps the key alive. */
    Py_BEGIN_ALLOW_THREADS
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    double whole_s = floor(patience_s);
    until.tv_sec += (time_t)whole_s;
    until.tv_nsec += (long)((patience_s - whole_s) * 1e9);
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&self->lock);
    Entry **place = place_of(self, key), *entry = *place;
    if (entry != NULL) {
        *place = entry->next;
        entry->next = self->removed;
        self->removed = entry;
    }
    while ((accessed = is_accessed(self, key)))
        if (pthread_cond_timedwait(&self->quiet, &self->lock, &until) != 0)
            break;
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    reap(self);
    return PyBool_FromLong(!accessed);
}

static PyObject *table_cut(Table *self, PyObject *args)
{
    const uint8_t *key;
    Py_ssize_t n_key;
    if (!PyArg_ParseTuple(args, "y#", &key, &n_key))
        return NULL;
    if (n_key != KEY_BYTES)
        return PyErr_Format(PyExc_ValueError, "a key of %zd bytes, keys have %d", n_key, KEY_BYTES);
    pthread_mutex_lock(&self->lock);
    for (Server *server = self->servers; server != NULL; server = server->next)
        for (size_t i = 0; i < server->n_accesses; i++)
            if (memcmp(server->accesses[i].entry->key, key, KEY_BYTES) == 0) {
                shutdown(server->wire.fd, SHUT_RDWR);
                break;
            }
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *table_clear(Table *self, PyObject *Py_UNUSED(none))
{
    pthread_mutex_lock(&self->lock);
    for (size_t i = 0; i < N_BUCKETS; i++)
        while (self->buckets[i] != NULL) {
            Entry *entry = self->buckets[i];
            self->buckets[i] = entry->next;
            entry->next = self->removed;
            self->removed = entry;
        }
    pthread_mutex_unlock(&self->lock);
    reap(self);
    Py_RETURN_NONE;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long generation;
    static char *names[] = {"generation", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K", names, &generation))
        return NULL;
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->generation = generation;
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&self->quiet, &clock);
    pthread_condattr_destroy(&clock);
    return (PyObject *)self;
}

static void table_dealloc(Table *self)
{
    /* Whoever serves holds a reference, so nothing is leased here. */
    PyObject *none = table_clear(self, NULL);
    Py_XDECREF(none);
    pthread_cond_destroy(&self->quiet);
    pthread_mutex_destroy(&self->lock);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef table_methods[] = {
    {"add", (PyCFunction)table_add, METH_VARARGS, "Serve this memory under this key; one that is known stays."},
    {"remove", (PyCFunction)table_remove, METH_VARARGS,
     "Serve this key no more, and wait so many seconds for its last access; whether it has ended."},
    {"cut", (PyCFunction)table_cut, METH_VARARGS, "Shut down the connections that access this key now."},
    {"clear", (PyCFunction)table_clear, METH_NOARGS, "Serve nothing any more."},
    {"serve", (PyCFunction)table_serve, METH_VARARGS,
     "Answer the usual requests of a connection, given and giving back what of `ahead` is not taken yet."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Table_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "halfmoon_transfer_native._native.Table",
    .tp_doc = "The regions of one segment that lie in memory, and the loop that serves them.",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = table_new,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_methods = table_methods,
};
