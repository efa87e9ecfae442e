"""Mooncake's handshake port: one question and one answer per connection.

    u64 length, little-endian | u8 kind | JSON        length = 1 + bytes of JSON

    kind 0  connection    two RDMA devices get to know each other; refused here
         1  metadata      {my segment record}            -> {your segment record}
         2  notify        {"name", "notify_msg"}         -> {"name": "", "notify_msg": "success"}
         3  probe         {}                             -> {"status": "success"}

The answer has the question's kind. Then the owner half-closes and waits for the other to close.
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
    """What is asked."""

    CONNECTION = 0
    METADATA = 1
    NOTIFY = 2
    PROBE = 3


class MooncakeRefusal(Exception):
    """The peer understood and does not want to; the text is its reason."""


# The framing.


def encode(kind: HandshakeKind, body: bytes) -> bytes:
    """A question or an answer.

    Raises:
        ValueError: it is too long for the other side.
    """
    if len(body) + 1 > MAX_BYTES:
        raise ValueError(f"a handshake of {len(body)} bytes, at most {MAX_BYTES - 1}")
    return _HEAD.pack(len(body) + 1, kind) + body


def decode_head(head: bytes | memoryview) -> tuple[HandshakeKind, int]:
    """The kind, and how many bytes of JSON follow.

    Raises:
        FrameError: too long, or a kind that there isn't.
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
    """One question or answer.

    Raises:
        FrameError: it is none.
        OSError: the connection broke, or the peer is too slow.
    """
    kind, n_bytes = decode_head(receive(sock, HEAD_BYTES))
    return kind, bytes(receive(sock, n_bytes))


# Asking.


def exchange_records(sock: socket.socket, own: SegmentRecord) -> SegmentRecord:
    """Exchange segment records.

    Raises:
        FrameError, RecordError: the answer is none.
        OSError: the connection broke.
    """
    return mooncake_records.decode_segment(
        _ask(sock, HandshakeKind.METADATA, mooncake_records.encode(own))
    )


def send_notification(sock: socket.socket, notification: MooncakeNotification) -> None:
    """Leave a message.

    Raises:
        Refusal: the peer does not take it.
        ValueError: it is too long.
        FrameError, RecordError: the answer is none.
        OSError: the connection broke.
    """
    answer = _ask(sock, HandshakeKind.NOTIFY, mooncake_records.encode(notification))
    said = mooncake_records.decode_notification(answer).notify_msg
    if said != _SUCCESS:
        raise MooncakeRefusal(said)


def send_probe(sock: socket.socket) -> None:
    """Ask for a sign of life.

    Raises:
        Refusal: the peer says that it isn't well.
        FrameError: the answer is none.
        OSError: the connection broke.
    """
    answer = _ask(sock, HandshakeKind.PROBE, b"{}")
    try:
        said = msgspec.json.decode(answer, type=dict[str, str]).get("status", "")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MooncakeFrameError(f"not the answer to a probe: {error}") from None
    if said != _SUCCESS:
        raise MooncakeRefusal(said)


def _ask(sock: socket.socket, kind: HandshakeKind, body: bytes) -> bytes:
    send_all(sock, [encode(kind, body)])
    answered, answer = read_message(sock)
    if answered != kind:
        raise MooncakeFrameError(f"asked {kind.name}, answered {answered.name}")
    return answer


# Answering.


def notify_answer(refused: str = "") -> bytes:
    """Whether a message was taken."""
    return mooncake_records.encode(MooncakeNotification("", refused or _SUCCESS))


def probe_answer() -> bytes:
    """A sign of life."""
    return msgspec.json.encode({"status": _SUCCESS})


def connection_answer() -> bytes:
    """No: there is no RDMA behind this port."""
    return msgspec.json.encode({"reply_msg": "this segment is reached over tcp only"})


def half_close(sock: socket.socket, linger_s: float) -> None:
    """Half-close and wait for the other side to close, not for ever."""
    until = time.monotonic() + linger_s
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(4096):
                return
