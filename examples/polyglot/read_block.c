/* Reads a block from a kvstore over the transfer wire, and writes it to the standard output.
 *
 *   cc -o read_block read_block.c -lxxhash
 *   read_block HOST PORT SEGMENT GENERATION KEY OFFSET LENGTH
 *
 * HOST and PORT are in the segment's record. The others, KEY in hexadecimal digits, are in the
 * region and the places of a `blocks_leased`. For clusters without a cluster key, on machines that
 * store the lowest byte first. */

#define _GNU_SOURCE /* memmem */
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { READ = 1, UNREADABLE = 255, WITH_CHECKSUMS = 1, MAX_SLICE = 16 << 20 };

struct header { char magic[4]; uint8_t version, op; uint16_t n; uint32_t flags, zero; uint64_t id, generation; };
struct slice { uint8_t key[16]; uint64_t offset; uint32_t length, zero; uint64_t sum; };
struct result { uint8_t status, zero[7]; uint64_t detail; };
struct request { struct header head; struct slice slice; uint64_t sum; };
struct reply { struct header head; struct result result; uint64_t sum; };

static void fail(const char *why) {
    fprintf(stderr, "read_block: %s\n", why);
    exit(1);
}

static int dial(const char *host, const char *port) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, port, &want, &found)) fail("no such address");
    int peer = socket(found->ai_family, SOCK_STREAM, 0);
    if (connect(peer, found->ai_addr, found->ai_addrlen)) fail("nothing listens there");
    return peer;
}

static void say(int peer, const void *bytes, size_t n) {
    if (send(peer, bytes, n, MSG_NOSIGNAL) != (ssize_t)n) fail("the connection is down");
}

static void receive(int peer, void *bytes, size_t n) {
    if (recv(peer, bytes, n, MSG_WAITALL) != (ssize_t)n) fail("the connection has ended");
}

/* Parts of MessagePack. */
static uint8_t *text(uint8_t *at, const char *words) {
    size_t n = strlen(words);
    *at++ = 0xda, *at++ = n >> 8, *at++ = n;
    return (uint8_t *)memcpy(at, words, n) + n;
}

static uint8_t *number(uint8_t *at, uint64_t value) {
    *at++ = 0xcf, value = __builtin_bswap64(value);
    return (uint8_t *)memcpy(at, &value, 8) + 8;
}

static void say_hello(int peer, const char *segment, uint64_t generation) {
    uint8_t frame[4096] = "HMTH\1", *at = frame + 8;
    if (strlen(segment) > 512) fail("the segment's name is too long");
    *at++ = 0x83;
    at = text(text(at, "segment"), segment);
    at = number(text(at, "generation"), generation);
    at = text(at, "session");
    *at++ = 0xc4, *at++ = 16; /* bytes, a name for this program's connections */
    if (getentropy(at, 16)) fail("no random bytes");
    uint16_t n = (at += 16) - frame - 8;
    memcpy(frame + 6, &n, 2);
    say(peer, frame, at - frame);
    receive(peer, frame, 8);
    memcpy(&n, frame + 6, 2);
    if (memcmp(frame, "HMTH\1", 5) || n > 4088) fail("the answer is no hello");
    receive(peer, frame + 8, n);
    if (!memmem(frame + 8, n, "\xa7refused\xa0", 9)) fail("refused: look into the owner's log");
}

int main(int argc, char **argv) {
    if (argc != 8) fail("HOST PORT SEGMENT GENERATION KEY OFFSET LENGTH");
    uint64_t generation = strtoull(argv[4], NULL, 10), length = strtoull(argv[7], NULL, 10);
    if (strlen(argv[5]) != 32 || length < 1 || length > MAX_SLICE) fail("KEY or LENGTH is wrong");
    struct request asked = {.head = {"HMTQ", 1, READ, 1, WITH_CHECKSUMS, 0, 1, generation}};
    for (int i = 0; i < 16; i++) sscanf(argv[5] + 2 * i, "%2hhx", &asked.slice.key[i]);
    asked.slice.offset = strtoull(argv[6], NULL, 10), asked.slice.length = length;
    asked.sum = XXH3_64bits(&asked, sizeof asked - 8);
    int peer = dial(argv[1], argv[2]);
    say_hello(peer, argv[3], generation);
    say(peer, &asked, sizeof asked);
    struct reply reply;
    receive(peer, &reply.head, sizeof reply.head);
    if (memcmp(reply.head.magic, "HMTR\1", 5) || reply.head.op == UNREADABLE) fail("not understood");
    receive(peer, &reply.result, sizeof reply - sizeof reply.head);
    if (reply.sum != XXH3_64bits(&reply, sizeof reply - 8)) fail("the reply's checksum is wrong");
    if (reply.result.status) return fprintf(stderr, "status %d\n", reply.result.status), 2;
    uint8_t *block = malloc(length);
    receive(peer, block, length);
    if (XXH3_64bits(block, length) != reply.result.detail) fail("the block's checksum is wrong");
    return fwrite(block, 1, length, stdout) == length ? 0 : 1;
}
