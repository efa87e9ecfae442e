/* Seal bytes into records and open them, by the AES-256-GCM of OpenSSL.
 *
 * The format is defined in `halfmoon_transfer.backends.tcp.record_layer`. A record is opened in place,
 * where it arrived, and its bytes are copied out only when its tag is right: no byte that was
 * changed in transit ever gets into a region.
 *
 * libcrypto is looked for when the module is imported, not when it is built: so a build needs no
 * headers of it, and a machine without it has all but encryption. The functions below are those of
 * OpenSSL 3 with its own names, and their signatures are part of its stable interface.
 */
#include "records.h"

#include <dlfcn.h>
#include <errno.h>

enum {
    RECORD_BYTES = 64 * 1024,
    LENGTH_BYTES = 4,
    TAG_BYTES = 16,
    NONCE_BYTES = 12,
    SECRET_BYTES = 32,
    SEALED_BYTES = LENGTH_BYTES + RECORD_BYTES + TAG_BYTES,
    /* EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG. */
    GET_TAG = 0x10,
    SET_TAG = 0x11,
};

typedef struct evp_cipher_ctx_st EVP_CIPHER_CTX;
typedef struct evp_cipher_st EVP_CIPHER;

static struct {
    EVP_CIPHER_CTX *(*new)(void);
    void (*free)(EVP_CIPHER_CTX *);
    const EVP_CIPHER *(*aes_256_gcm)(void);
    int (*init)(EVP_CIPHER_CTX *, const EVP_CIPHER *, void *, const uint8_t *, const uint8_t *, int);
    int (*update)(EVP_CIPHER_CTX *, uint8_t *, int *, const uint8_t *, int);
    int (*final)(EVP_CIPHER_CTX *, uint8_t *, int *);
    int (*ctrl)(EVP_CIPHER_CTX *, int, int, void *);
} evp;

static const char *missing = "not looked for";

void records_init(void)
{
    static const struct {
        const char *name;
        void *into;
    } wanted[] = {
        {"EVP_CIPHER_CTX_new", &evp.new},       {"EVP_CIPHER_CTX_free", &evp.free},
        {"EVP_aes_256_gcm", &evp.aes_256_gcm},  {"EVP_CipherInit_ex", &evp.init},
        {"EVP_CipherUpdate", &evp.update},      {"EVP_CipherFinal_ex", &evp.final},
        {"EVP_CIPHER_CTX_ctrl", &evp.ctrl},
    };
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        missing = "libcrypto.so.3 of OpenSSL 3 is not installed";
        return;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (found == NULL) {
            missing = "libcrypto.so.3 lacks a function that encryption needs";
            return;
        }
        memcpy(wanted[i].into, &found, sizeof found);
    }
    missing = "";
}

const char *records_missing(void) { return missing; }

struct Records {
    PyObject_HEAD
    EVP_CIPHER_CTX *sealing, *opening;
    /* Records so far, which make the nonces; and how many are sealed at most. */
    uint64_t n_sealed, n_opened, limit;
    /* What is to be sent. */
    uint8_t outgoing[SEALED_BYTES];
    /* As it arrived and not opened yet: arrived[first:last]. Opened and not handed out yet:
     * arrived[plain:n_plain + plain], which lies before `first`. */
    size_t first, last;
    size_t plain, n_plain;
    uint8_t arrived[2 * SEALED_BYTES];
};

static void make_nonce(uint8_t *nonce, uint64_t number)
{
    memset(nonce, 0, 4);
    put64(nonce + 4, number);
}

End records_seal(Records *records, struct iovec *buffers, size_t n_buffers, size_t *first, struct iovec *sealed)
{
    if (records->n_sealed >= records->limit) {
        errno = EKEYEXPIRED;
        return FAILED;
    }
    size_t n_plain = 0;
    for (size_t i = *first; i < n_buffers && n_plain < RECORD_BYTES; i++)
        n_plain += buffers[i].iov_len;
    if (n_plain > RECORD_BYTES)
        n_plain = RECORD_BYTES;
    uint8_t nonce[NONCE_BYTES], *out = records->outgoing;
    /* Counted at once: a nonce is never used again, whatever happens. */
    make_nonce(nonce, records->n_sealed++);
    put32(out, (uint32_t)n_plain);
    int n = 0;
    bool fine = evp.init(records->sealing, NULL, NULL, NULL, nonce, 1) == 1 &&
                evp.update(records->sealing, NULL, &n, out, LENGTH_BYTES) == 1;
    size_t at = LENGTH_BYTES;
    for (size_t left = n_plain; fine && left > 0;) {
        struct iovec *from = &buffers[*first];
        size_t n_part = from->iov_len < left ? from->iov_len : left;
        fine = n_part == 0 || evp.update(records->sealing, out + at, &n, from->iov_base, (int)n_part) == 1;
        from->iov_base = (uint8_t *)from->iov_base + n_part;
        from->iov_len -= n_part;
        at += n_part;
        left -= n_part;
        if (from->iov_len == 0)
            ++*first;
    }
    if (!fine || evp.final(records->sealing, out + at, &n) != 1 ||
        evp.ctrl(records->sealing, GET_TAG, TAG_BYTES, out + at) != 1) {
        errno = EIO;
        return FAILED;
    }
    *sealed = (struct iovec){out, at + TAG_BYTES};
    return DONE;
}

/* Open the next record in place. UNUSUAL: it has not arrived as a whole. */
static End open_next(Records *records)
{
    size_t n_arrived = records->last - records->first;
    uint8_t *at = records->arrived + records->first;
    if (n_arrived < LENGTH_BYTES)
        return UNUSUAL;
    uint32_t n_plain = get32(at);
    if (n_plain < 1 || n_plain > RECORD_BYTES)
        return TAMPERED;
    if (n_arrived < LENGTH_BYTES + n_plain + TAG_BYTES)
        return UNUSUAL;
    uint8_t nonce[NONCE_BYTES], *plain = at + LENGTH_BYTES;
    make_nonce(nonce, records->n_opened);
    int n = 0;
    if (evp.init(records->opening, NULL, NULL, NULL, nonce, 0) != 1 ||
        evp.update(records->opening, NULL, &n, at, LENGTH_BYTES) != 1 ||
        evp.update(records->opening, plain, &n, plain, (int)n_plain) != 1 ||
        evp.ctrl(records->opening, SET_TAG, TAG_BYTES, plain + n_plain) != 1 ||
        evp.final(records->opening, plain + n_plain, &n) != 1)
        return TAMPERED;
    records->n_opened++;
    records->plain = records->first + LENGTH_BYTES;
    records->n_plain = n_plain;
    records->first += LENGTH_BYTES + n_plain + TAG_BYTES;
    return DONE;
}

End records_take(Records *records, struct iovec *buffers, size_t n_buffers, size_t *n_taken)
{
    size_t n_before = *n_taken;
    for (size_t i = 0, n_filled = 0; i < n_buffers;) {
        if (records->n_plain == 0) {
            End end = open_next(records);
            if (end != DONE)
                return end == UNUSUAL && *n_taken > n_before ? DONE : end;
        }
        size_t room = buffers[i].iov_len - n_filled;
        size_t n = records->n_plain < room ? records->n_plain : room;
        memcpy((uint8_t *)buffers[i].iov_base + n_filled, records->arrived + records->plain, n);
        records->plain += n;
        records->n_plain -= n;
        *n_taken += n;
        n_filled += n;
        if (n_filled == buffers[i].iov_len) {
            i++;
            n_filled = 0;
        }
    }
    return DONE;
}

struct iovec records_room(Records *records)
{
    /* Nothing opened is left here, or `records_take` would have handed it out. */
    if (records->first > 0) {
        memmove(records->arrived, records->arrived + records->first, records->last - records->first);
        records->last -= records->first;
        records->first = 0;
    }
    return (struct iovec){records->arrived + records->last, sizeof records->arrived - records->last};
}

void records_arrived(Records *records, size_t n_bytes) { records->last += n_bytes; }

bool records_in_the_middle(const Records *records) { return records->last > records->first; }

/* What Python sees. */

static EVP_CIPHER_CTX *with_key(const uint8_t *key, int seals)
{
    EVP_CIPHER_CTX *made = evp.new();
    if (made != NULL && evp.init(made, evp.aes_256_gcm(), NULL, key, NULL, seals) != 1) {
        evp.free(made);
        made = NULL;
    }
    return made;
}

static PyObject *records_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    const uint8_t *sending, *receiving;
    Py_ssize_t n_sending, n_receiving;
    unsigned long long limit;
    if (!PyArg_ParseTuple(args, "y#y#K", &sending, &n_sending, &receiving, &n_receiving, &limit))
        return NULL;
    if (*missing != '\0')
        return PyErr_Format(PyExc_RuntimeError, "no encryption: %s", missing);
    if (n_sending != SECRET_BYTES || n_receiving != SECRET_BYTES)
        return PyErr_Format(PyExc_ValueError, "keys of %zd and %zd bytes, they have %d", n_sending, n_receiving,
                            SECRET_BYTES);
    Records *self = (Records *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->limit = limit;
    self->sealing = with_key(sending, 1);
    self->opening = with_key(receiving, 0);
    if (self->sealing == NULL || self->opening == NULL) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_RuntimeError, "no encryption: libcrypto has no AES-256-GCM");
    }
    return (PyObject *)self;
}

static void records_dealloc(Records *self)
{
    if (self->sealing != NULL)
        evp.free(self->sealing);
    if (self->opening != NULL)
        evp.free(self->opening);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Wire wire_over(int fd, Records *records) { return (Wire){.fd = fd, .records = records}; }

static PyObject *records_send(Records *self, PyObject *args)
{
    int fd;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "iO!", &fd, &PyTuple_Type, &tuple))
        return NULL;
    size_t n = (size_t)PyTuple_GET_SIZE(tuple), n_held = 0;
    PyObject *result = NULL;
    Py_buffer *held = PyMem_RawMalloc((n + 1) * sizeof *held);
    struct iovec *buffers = PyMem_RawMalloc((n + 1) * sizeof *buffers);
    if (held == NULL || buffers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; n_held < n; n_held++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, n_held), &held[n_held], PyBUF_SIMPLE) < 0)
            goto done;
        buffers[n_held] = (struct iovec){held[n_held].buf, (size_t)held[n_held].len};
    }
    Wire wire = wire_over(fd, self);
    wire.thread = PyEval_SaveThread();
    End how = wire_send(&wire, buffers, n);
    int error = errno;
    PyEval_RestoreThread(wire.thread);
    errno = error;
    if (how == DONE)
        result = Py_NewRef(Py_None);
    else
        wire_raise(&wire, how);
done:
    while (n_held > 0)
        PyBuffer_Release(&held[--n_held]);
    PyMem_RawFree(held);
    PyMem_RawFree(buffers);
    return result;
}

static PyObject *records_receive(Records *self, PyObject *args)
{
    int fd;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "iw*", &fd, &buffer))
        return NULL;
    struct iovec into = {buffer.buf, (size_t)buffer.len};
    size_t n_received = 0;
    Wire wire = wire_over(fd, self);
    wire.thread = PyEval_SaveThread();
    End how = wire_receive(&wire, &into, 1, &n_received);
    int error = errno;
    PyEval_RestoreThread(wire.thread);
    errno = error;
    PyBuffer_Release(&buffer);
    if (how == DONE || how == UNUSUAL)
        return PyLong_FromSize_t(n_received);
    wire_raise(&wire, how);
    return NULL;
}

static PyObject *records_counts(Records *self, void *Py_UNUSED(closure))
{
    return Py_BuildValue("KK", (unsigned long long)self->n_sealed, (unsigned long long)self->n_opened);
}

uint64_t records_n_opened(const Records *records) { return records->n_opened; }

int records_or_none(PyObject *given, void *records)
{
    if (given != Py_None && !PyObject_TypeCheck(given, &Records_Type)) {
        PyErr_SetString(PyExc_TypeError, "neither Records nor None");
        return 0;
    }
    *(Records **)records = given == Py_None ? NULL : (Records *)given;
    return 1;
}

static PyMethodDef records_methods[] = {
    {"send", (PyCFunction)records_send, METH_VARARGS, "Seal and send a tuple of buffers."},
    {"receive", (PyCFunction)records_receive, METH_VARARGS,
     "Receive some bytes into a buffer; 0 when the peer has hung up between records."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef records_attributes[] = {
    {"counts", (getter)records_counts, NULL, "Records sealed and opened so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject Records_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "halfmoon_transfer_native._native.Records",
    .tp_doc = "Both directions of one encrypted connection.",
    .tp_basicsize = sizeof(Records),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = records_new,
    .tp_dealloc = (destructor)records_dealloc,
    .tp_methods = records_methods,
    .tp_getset = records_attributes,
};
