/* What both sides share: the framing's numbers, and whole buffers in and out of a socket.
 *
 * The framing is defined in `halfmoon_transfer.backends.tcp.tcp_frames`; here are only those parts of
 * it that a request and a reply in which all is well need. Nothing here holds the interpreter.
 */
#ifndef HALFMOON_WIRE_H
#define HALFMOON_WIRE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    VERSION = 1,
    READ = 1,
    WRITE = 2,
    CHECKSUMS = 1,
    KEY_BYTES = 16,
    HEADER_BYTES = 32,
    ASKED_BYTES = 40,
    ANSWERED_BYTES = 16,
    SUM_BYTES = 8,
    MAX_SLICES = 1024,
    MAX_SLICE_BYTES = 16 * 1024 * 1024,
    MAX_FRAME_BYTES = 64 * 1024 * 1024,
    STATUS_OK = 0,
    STATUS_CHECKSUM_MISMATCH = 6,
    /* Bytes that are moved and summed at a time, so that they are still in the cache. */
    HOT_BYTES = 256 * 1024,
    /* Buffers of one system call (IOV_MAX is 1024). */
    MAX_BUFFERS = 256,
};

/* How something ended. What is not DONE has left the connection useless, but for UNUSUAL: then
 * everything from the odd frame on is still ahead, for Python to look at. */
typedef enum {
    DONE = 0,
    UNUSUAL = -1,
    FAILED = -2,      /* errno says why */
    HUNG_UP = -3,     /* the peer did, in the middle */
    INTERRUPTED = -4, /* a Python error is set, by a signal's handler */
    TAMPERED = -5,    /* an encrypted record is not as its sender sealed it */
} End;

/* The state of an encrypted connection, see `records.h`. */
typedef struct Records Records;

/* A connection for the time of one call. */
typedef struct {
    int fd;
    /* NULL where bytes travel in the clear. */
    Records *records;
    /* How long to look for the next frame before going to sleep. To be woken takes many times as
     * long as a small frame does, so where these go back and forth it is better to stay awake. */
    double spin_s;
    /* The caller's thread state, to let it handle signals; NULL where that is not its job. */
    PyThreadState *thread;
    /* What was read and not taken yet is ahead[start:end]; the memory is Python's. */
    uint8_t *ahead;
    size_t n_ahead;
    size_t start;
    size_t end;
} Wire;

/* Have at least `n_bytes` ahead; at most `n_ahead`. UNUSUAL: the peer hung up before. */
End wire_have(Wire *wire, size_t n_bytes);
/* Fill all of these, in order, with what is ahead and what comes. Changes the vector. */
End wire_fill(Wire *wire, struct iovec *buffers, size_t n_buffers);
/* Receive something: its length is added to `*n_received`. UNUSUAL: the peer hung up. */
End wire_receive(Wire *wire, struct iovec *buffers, size_t n_buffers, size_t *n_received);
/* Send all of these, in order. Changes the vector. */
End wire_send(Wire *wire, struct iovec *buffers, size_t n_buffers);
/* Set the Python error for what is neither DONE nor UNUSUAL. */
void wire_raise(const Wire *wire, End end);

static inline uint16_t get16(const uint8_t *at) { uint16_t v; memcpy(&v, at, 2); return le16toh(v); }
static inline uint32_t get32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return le32toh(v); }
static inline uint64_t get64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return le64toh(v); }
static inline void put16(uint8_t *at, uint16_t v) { v = htole16(v); memcpy(at, &v, 2); }
static inline void put32(uint8_t *at, uint32_t v) { v = htole32(v); memcpy(at, &v, 4); }
static inline void put64(uint8_t *at, uint64_t v) { v = htole64(v); memcpy(at, &v, 8); }

/* The checksum of everything: bytes and heads. */
static inline uint64_t sum_of(const uint8_t *bytes, size_t n_bytes) { return XXH3_64bits(bytes, n_bytes); }

/* The 32 bytes that a request and a reply begin with. */
static inline void put_header(uint8_t *at, const char *magic, int op, size_t n_slices, uint32_t flags,
                              uint64_t number, uint64_t generation)
{
    memcpy(at, magic, 4);
    at[4] = VERSION;
    at[5] = (uint8_t)op;
    put16(at + 6, (uint16_t)n_slices);
    put32(at + 8, flags);
    put32(at + 12, 0);
    put64(at + 16, number);
    put64(at + 24, generation);
}

/* Whether a head of so many bytes ends in its own checksum. */
static inline bool head_is_whole(const uint8_t *head, size_t n_bytes)
{
    return sum_of(head, n_bytes - SUM_BYTES) == get64(head + n_bytes - SUM_BYTES);
}

#endif
