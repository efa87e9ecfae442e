"""Encode and decode the frames of the TCP backend, byte for byte. Pure.

All integers are little-endian. The side that dials is the *initiator*, the other the *owner*.
After connecting, the initiator sends a hello and the owner answers it. Then follow requests and
replies, in order. An initiator may send further requests before the first reply has come.

    hello      4s "HMTH" | u8 version 1 | u8 0 | u16 n | n bytes: MessagePack map
               initiator: {segment, generation, session, number, over, origin,
                          origin_generation, nonce, share}: the wanted segment; its session and
                          the connection's number in it; the numbers of earlier connections that
                          must end before the answer (`tcp_sessions`); the initiator's segment
               owner:     {segment, generation, refused, nonce, share}: its segment, and the
                          reason of a refusal ("": accepted)
               `nonce` is 32 random bytes if the side has a cluster key, else empty. An owner
               with a key refuses hellos without one, an initiator hangs up on owners without.
               `share` is the side's X25519 public key of 32 bytes for this connection if it
               has a cluster key and encrypts, else empty. Sides that differ in this part
               Unknown fields are ignored.

    proof      4s "HMTP" | u8 version 1 | u8 0 | u16 n | n bytes: MessagePack map
               {proof, refused}; only when both hellos have a nonce. First the initiator's,
               then the owner's. After a wrong proof the owner sends a refusal without a proof.
               A proof is HMAC-SHA-256 with the cluster key (`cluster_key`) over the prover's
               role and the maps of both hellos

After the proofs, all bytes of connections with shares are inside of encrypted records
(`record_layer`).

    request    4s "HMTQ" | u8 version 1 | u8 op | u16 n | u32 flags | u32 0
               | u64 request id | u64 generation                                    32 bytes
               n entries of 40 bytes:
                 16s key | u64 offset | u32 length | u32 0 | u64 sum
               u64 xxh3-64 of header and entries
               op 2 (write): the slices' bytes, one after the other

    reply      4s "HMTR" | u8 version 1 | u8 op | u16 n | u32 0 | u32 0
               | u64 request id | u64 0                                             32 bytes
               n entries of 16 bytes: u8 status | 7 zero bytes | u64 detail
               u64 xxh3-64 of header and entries
               op 1 (read): the bytes of the slices whose status is 0, one after the other

               op 3 (notify): its one entry has the notification's id for a key and the length and
               checksum of its body, a MessagePack array of sender and message that follows

    op         1 read, 2 write, 3 notify; in a reply also 255: the owner could not read the request;
               n is 0, n_text bytes (the u32 after n) of UTF-8 with the reason follow the
               checksum, and the connection is closed
    flags      1: bytes carry checksums. `sum` of a written slice is the xxh3-64 of its bytes
               (0 in a read); `detail` of a read slice with status 0 is the same
    status     as in `regions.access.AccessStatus`, which also defines `detail`

Limits, checked before anything is allocated: 1 to 1,024 slices of 1 byte to 16 MiB in a
request, 64 MiB in all, 4,096 bytes of hello or proof, 8,192 of a notification's body.

A written slice is received straight into the region and checked there. If its checksum is wrong,
status 6 is the answer, and the initiator sends it again. Bytes of a refused slice are dropped.
"""

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.cluster_key import NONCE_BYTES
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessStatus

VERSION = 1
READ, WRITE, NOTIFY, FAILED = 1, 2, 3, 255
CHECKSUMS = 1

MAX_SLICES = 1024
MAX_SLICE_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_HELLO_BYTES = 4096
MAX_TEXT_BYTES = 512
MAX_NOTICE_BYTES = 8192
#: Of an X25519 public key.
SHARE_BYTES = 32
#: Bytes that name the connections of one initiator.
SESSION_BYTES = 16

_HELLO = struct.Struct("<4sBBH")
_HEADER = struct.Struct("<4sBBHIIQQ")
_ASKED = struct.Struct(f"<{KEY_BYTES}sQIIQ")
_ANSWERED = struct.Struct("<BxxxxxxxQ")
_SUM = struct.Struct("<Q")

#: Quicker than calling the enum.
_STATUSES = {int(status): status for status in AccessStatus}

HELLO_HEADER_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size


class TcpFrameError(ValueError):
    """Bytes that are no frame; the connection can't be used any more."""


class TcpHello(msgspec.Struct, frozen=True):
    """The first frame of either side."""

    segment: str
    generation: int
    refused: str = ""
    #: The initiator's 16 random bytes, and the connection's number among its own.
    session: bytes = b""
    number: int = 0
    over: tuple[int, ...] = ()
    #: The initiator's own segment.
    origin: str = ""
    origin_generation: int = 0
    #: Random bytes of a side that has a cluster key; else empty.
    nonce: bytes = b""
    #: The X25519 public key of a side that encrypts this connection; else empty.
    share: bytes = b""


class TcpProof(msgspec.Struct, frozen=True):
    """The proof that one side knows the cluster key."""

    proof: bytes = b""
    refused: str = ""


class SliceRequest(msgspec.Struct, frozen=True):
    """One slice of a request."""

    key: bytes
    offset: int
    length: int
    checksum: int = 0


class TcpRequest(msgspec.Struct, frozen=True):
    """The head of a request, without the bytes of a write."""

    op: int
    number: int
    generation: int
    checksums: bool
    slices: tuple[SliceRequest, ...]


class SliceReply(msgspec.Struct, frozen=True):
    """The outcome of one slice."""

    status: AccessStatus
    detail: int = 0


class TcpReply(msgspec.Struct, frozen=True):
    """The head of a reply, without the bytes of a read."""

    op: int
    number: int
    slices: tuple[SliceReply, ...]


# Hello.


def encode_hello(hello: TcpHello) -> bytes:
    """Encode a whole hello."""
    body = msgspec.msgpack.encode(hello)
    return _HELLO.pack(b"HMTH", VERSION, 0, len(body)) + body


def hello_bytes(header: bytes | memoryview) -> int:
    """Return how many bytes of hello follow this header.

    Raises:
        TcpFrameError: it is no such header, or too long.
    """
    return _words_bytes(header, b"HMTH", "hello")


def decode_hello(body: bytes | memoryview) -> TcpHello:
    """Decode the hello after its header.

    Raises:
        TcpFrameError: it is malformed.
    """
    try:
        hello = msgspec.msgpack.decode(body, type=TcpHello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TcpFrameError(f"not a hello: {error}") from None
    if len(hello.nonce) not in (0, NONCE_BYTES):
        raise TcpFrameError(f"a nonce of {len(hello.nonce)} bytes, it has {NONCE_BYTES}")
    if len(hello.share) not in (0, SHARE_BYTES):
        raise TcpFrameError(f"a share of {len(hello.share)} bytes, it has {SHARE_BYTES}")
    if len(hello.session) not in (0, SESSION_BYTES):
        raise TcpFrameError(f"a session of {len(hello.session)} bytes, it has {SESSION_BYTES}")
    return hello


def encode_proof(proof: TcpProof) -> bytes:
    """Encode a whole proof."""
    body = msgspec.msgpack.encode(proof)
    return _HELLO.pack(b"HMTP", VERSION, 0, len(body)) + body


def proof_bytes(header: bytes | memoryview) -> int:
    """Return how many bytes of proof follow this header.

    Raises:
        TcpFrameError: it is no such header, or too long.
    """
    return _words_bytes(header, b"HMTP", "proof")


def decode_proof(body: bytes | memoryview) -> TcpProof:
    """Decode the proof after its header.

    Raises:
        TcpFrameError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(body, type=TcpProof)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TcpFrameError(f"not a proof: {error}") from None


def _words_bytes(header: bytes | memoryview, magic: bytes, what: str) -> int:
    found, version, _, length = _HELLO.unpack(header)
    _check_start(found, magic, version)
    if length > MAX_HELLO_BYTES:
        raise TcpFrameError(f"a {what} of {length} bytes, at most {MAX_HELLO_BYTES}")
    return int(length)


# Requests.


def encode_request(request: TcpRequest) -> bytes:
    """Encode header, entries and their checksum."""
    head = bytearray(
        _HEADER.pack(
            b"HMTQ",
            VERSION,
            request.op,
            len(request.slices),
            CHECKSUMS if request.checksums else 0,
            0,
            request.number,
            request.generation,
        )
    )
    for each in request.slices:
        head += _ASKED.pack(each.key, each.offset, each.length, 0, each.checksum)
    return _summed(head)


def request_rest_bytes(header: bytes | memoryview) -> int:
    """Return how many bytes of entries and checksum follow this header.

    Raises:
        TcpFrameError: it is not the header of a request, or over a limit.
    """
    magic, version, op, n_slices, flags, _, _, _ = _HEADER.unpack(header)
    _check_start(magic, b"HMTQ", version)
    if op not in (READ, WRITE, NOTIFY):
        raise TcpFrameError(f"a request with op {op}")
    if flags & ~CHECKSUMS:
        raise TcpFrameError(f"a request with unknown flags {flags:#x}")
    if not 1 <= n_slices <= (1 if op == NOTIFY else MAX_SLICES):
        raise TcpFrameError(f"a request of {n_slices} slices, allowed are 1 to {MAX_SLICES}")
    return int(n_slices) * _ASKED.size + _SUM.size


def decode_request(header: bytes | memoryview, rest: bytes | memoryview) -> TcpRequest:
    """Decode a request whose header `request_rest_bytes` accepted.

    Raises:
        TcpFrameError: damaged, or over a limit.
    """
    _check_sum(header, rest)
    _, _, op, _, flags, _, number, generation = _HEADER.unpack(header)
    slices = tuple(
        SliceRequest(key, offset, length, checksum)
        for key, offset, length, _, checksum in _ASKED.iter_unpack(rest[: -_SUM.size])
    )
    if op == NOTIFY and slices[0].length > MAX_NOTICE_BYTES:
        raise TcpFrameError(f"a notice of {slices[0].length} bytes, at most {MAX_NOTICE_BYTES}")
    for each in slices:
        if not 1 <= each.length <= MAX_SLICE_BYTES:
            raise TcpFrameError(
                f"a slice of {each.length} bytes, allowed are 1 to {MAX_SLICE_BYTES}"
            )
    total = sum(each.length for each in slices)
    if total > MAX_FRAME_BYTES:
        raise TcpFrameError(f"a request for {total} bytes, at most {MAX_FRAME_BYTES}")
    return TcpRequest(op, number, generation, bool(flags & CHECKSUMS), slices)


# Notifications.


def encode_notification(number: int, generation: int, notification: OutgoingNotification) -> bytes:
    """Encode a request that delivers a notification."""
    body = msgspec.msgpack.encode((notification.sender, notification.message))
    entry = SliceRequest(notification.id, 0, len(body), xxhash.xxh3_64_intdigest(body))
    return encode_request(TcpRequest(NOTIFY, number, generation, True, (entry,))) + body


def decode_notification(entry: SliceRequest, body: bytes | memoryview) -> OutgoingNotification:
    """Decode the notification of a request with op 3.

    Raises:
        TcpFrameError: damaged, or the message is too long.
    """
    if xxhash.xxh3_64_intdigest(body) != entry.checksum:
        raise TcpFrameError("a notice with another checksum")
    try:
        sender, message = msgspec.msgpack.decode(body, type=tuple[str, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TcpFrameError(f"not a notice: {error}") from None
    if len(message) > MAX_NOTIFICATION_BYTES:
        raise TcpFrameError(f"a notice of {len(message)} bytes, at most {MAX_NOTIFICATION_BYTES}")
    return OutgoingNotification(entry.key, sender, message)


# Replies.


def encode_reply(op: int, number: int, slices: Sequence[SliceReply]) -> bytes:
    """Encode header, entries and their checksum."""
    head = bytearray(_HEADER.pack(b"HMTR", VERSION, op, len(slices), 0, 0, number, 0))
    for each in slices:
        head += _ANSWERED.pack(each.status, each.detail)
    return _summed(head)


def encode_failure(text: str) -> bytes:
    """Encode the reply to bytes that are no request."""
    body = text.encode()[:MAX_TEXT_BYTES]
    head = bytearray(_HEADER.pack(b"HMTR", VERSION, FAILED, 0, len(body), 0, 0, 0))
    return _summed(head) + body


def reply_rest_bytes(header: bytes | memoryview) -> tuple[int, int]:
    """Return how many bytes of entries and checksum, and then of failure text, follow.

    Raises:
        TcpFrameError: it is not the header of a reply, or over a limit.
    """
    magic, version, op, n_slices, n_text, _, _, _ = _HEADER.unpack(header)
    _check_start(magic, b"HMTR", version)
    if op not in (READ, WRITE, NOTIFY, FAILED) or n_slices > MAX_SLICES or n_text > MAX_TEXT_BYTES:
        raise TcpFrameError(f"a reply with op {op}, {n_slices} slices, {n_text} bytes of text")
    return int(n_slices) * _ANSWERED.size + _SUM.size, int(n_text)


def decode_reply(header: bytes | memoryview, rest: bytes | memoryview) -> TcpReply:
    """Decode a reply whose header `reply_rest_bytes` accepted.

    Raises:
        TcpFrameError: damaged, or with an unknown status.
    """
    _check_sum(header, rest)
    _, _, op, _, _, _, number, _ = _HEADER.unpack(header)
    try:
        slices = tuple(
            SliceReply(_STATUSES[status], detail)
            for status, detail in _ANSWERED.iter_unpack(rest[: -_SUM.size])
        )
    except KeyError as error:
        raise TcpFrameError(f"a reply with an unknown status: {error}") from None
    return TcpReply(op, number, slices)


def _check_start(magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected:
        raise TcpFrameError(f"{magic!r} where {expected!r} begins a frame")
    if version != VERSION:
        raise TcpFrameError(f"a frame of version {version}, this build speaks {VERSION}")


def _summed(head: bytearray) -> bytes:
    return bytes(head) + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def _check_sum(header: bytes | memoryview, rest: bytes | memoryview) -> None:
    (expected,) = _SUM.unpack(rest[-_SUM.size :])
    state = xxhash.xxh3_64(header)
    state.update(rest[: -_SUM.size])
    if state.intdigest() != expected:
        raise TcpFrameError("a frame whose header has another checksum")
