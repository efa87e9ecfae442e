"""Speak the protocol of Mooncake's handshake port: one request and one answer per connection.

    u64 length, little-endian | u8 kind | JSON        length = 1 + bytes of JSON

    kind 0  connection    pairs two RDMA devices; refused here
         1  metadata      {my segment record}            -> {your segment record}
         2  notify        {"name", "notify_msg"}         -> {"name": "", "notify_msg": "success"}
         3  probe         {}                             -> {"status": "success"}

The answer has the request's kind. Then the owner half-closes and waits for the peer to close.
Lengths are checked before anything is allocated: at most 1 MiB, as in Mooncake.
"""

import contextlib
import socket
import struct
import time
from enum import IntEnum

import msgspec

from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_frames import MooncakeFrameError
from halfmoon_transfer.backends.mooncake.mooncake_records import MooncakeNotification, SegmentRecord
from halfmoon_transfer.backends.socket_io import receive, send_all

MAX_BYTES = 1024 * 1024
HEAD_BYTES = 9
_HEAD = struct.Struct("<QB")
_SUCCESS = "success"


class HandshakeKind(IntEnum):
    """The kind of a handshake request."""

    CONNECTION = 0
    METADATA = 1
    NOTIFY = 2
    PROBE = 3


class MooncakeRefusal(Exception):
    """The peer understood the request and refused it; the text is its reason."""


# The framing.


def encode(kind: HandshakeKind, body: bytes) -> bytes:
    """Encode a request or an answer.

    Raises:
        ValueError: it is too long for the peer.
    """
    if len(body) + 1 > MAX_BYTES:
        raise ValueError(f"a handshake of {len(body)} bytes, at most {MAX_BYTES - 1}")
    return _HEAD.pack(len(body) + 1, kind) + body


def decode_head(head: bytes | memoryview) -> tuple[HandshakeKind, int]:
    """Decode the head; return the kind and the number of JSON bytes that follow.

    Raises:
        MooncakeFrameError: the length is out of bounds, or the kind is unknown.
    """
    length, kind = _HEAD.unpack(head)
    if not 1 <= length <= MAX_BYTES:
        raise MooncakeFrameError(f"a handshake of {length} bytes, 1 to {MAX_BYTES} are possible")
    try:
        return HandshakeKind(kind), int(length) - 1
    except ValueError:
        raise MooncakeFrameError(
            f"handshake kind {kind}; there are {[*map(int, HandshakeKind)]}"
        ) from None


def read_message(sock: socket.socket) -> tuple[HandshakeKind, bytes]:
    """Read one request or answer.

    Raises:
        MooncakeFrameError: the bytes are not a handshake.
        OSError: the connection broke, or the peer is too slow.
    """
    kind, n_bytes = decode_head(receive(sock, HEAD_BYTES))
    return kind, bytes(receive(sock, n_bytes))


# Requests.


def exchange_records(sock: socket.socket, own: SegmentRecord) -> SegmentRecord:
    """Send our segment record, and return the peer's.

    Raises:
        MooncakeFrameError, RecordError: the answer is not a record.
        OSError: the connection broke.
    """
    return mooncake_records.decode_segment(
        _request(sock, HandshakeKind.METADATA, mooncake_records.encode(own))
    )


def send_notification(sock: socket.socket, notification: MooncakeNotification) -> None:
    """Send a message.

    Raises:
        MooncakeRefusal: the peer does not accept it.
        ValueError: it is too long.
        MooncakeFrameError, RecordError: the answer is not valid.
        OSError: the connection broke.
    """
    answer = _request(sock, HandshakeKind.NOTIFY, mooncake_records.encode(notification))
    status = mooncake_records.decode_notification(answer).notify_msg
    if status != _SUCCESS:
        raise MooncakeRefusal(status)


def send_probe(sock: socket.socket) -> None:
    """Check that the peer answers a probe.

    Raises:
        MooncakeRefusal: the peer answers with a failure.
        MooncakeFrameError: the answer is not valid.
        OSError: the connection broke.
    """
    answer = _request(sock, HandshakeKind.PROBE, b"{}")
    try:
        status = msgspec.json.decode(answer, type=dict[str, str]).get("status", "")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MooncakeFrameError(f"not the answer to a probe: {error}") from None
    if status != _SUCCESS:
        raise MooncakeRefusal(status)


def _request(sock: socket.socket, kind: HandshakeKind, body: bytes) -> bytes:
    send_all(sock, [encode(kind, body)])
    answered, answer = read_message(sock)
    if answered != kind:
        raise MooncakeFrameError(f"asked {kind.name}, answered {answered.name}")
    return answer


# Answers.


def notify_answer(refused: str = "") -> bytes:
    """Encode the answer to a message: accepted, or the reason of the refusal."""
    return mooncake_records.encode(MooncakeNotification("", refused or _SUCCESS))


def probe_answer() -> bytes:
    """Encode the answer to a probe."""
    return msgspec.json.encode({"status": _SUCCESS})


def connection_answer() -> bytes:
    """Encode the refusal of an RDMA connection: this port offers none."""
    return msgspec.json.encode({"reply_msg": "this segment is reached over tcp only"})


def half_close(sock: socket.socket, linger_s: float) -> None:
    """Half-close, then wait for the peer to close, for at most `linger_s` seconds."""
    until = time.monotonic() + linger_s
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(4096):
                return
