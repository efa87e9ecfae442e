"""Encode and decode the messages on the side channel of an RDMA link.

It is a TCP connection from initiator to owner:

    4 bytes length, big-endian, 1 to 65536 · one message in MessagePack, tagged by its kind

    hello    -> welcome     the wanted segment, and the owner's devices
    prove    -> proven      both know the cluster key; only when both sent a nonce
    connect  -> connected   makes (or resets) the owner's end of one rail
    fence    -> fenced      the owner's end of a rail accepts no packet any more
    ask      -> granted     presents a region's key, gets its address and rkeys
             -> denied      … or the reason of a refusal
    anything -> failed      an error of the owner; the connection goes on
    (slot)   -> noted       the result of a notification, see `rail_notifications`

A nonce is 32 random bytes if the side has a cluster key (`cluster_key`), else empty. Proofs are
made over hello and welcome, encoded without their lengths. An owner that has a key refuses
hellos without a nonce, and answers nothing before the proof.

Each request has one answer, in order. The answer to a notification comes before those of requests
that were sent after it had arrived. A connection that sends anything else is closed. The owner's
ends live as long as the connection.
"""

import socket
import struct
from typing import Annotated

import msgspec

from halfmoon_transfer.backends.socket_io import receive, send_all
from halfmoon_transfer.cluster_key import NONCE_BYTES, PROOF_BYTES
from halfmoon_transfer.regions.access import AccessStatus

VERSION = 2
MAX_FRAME_BYTES = 64 * 1024
#: Bytes of the owner's slot: a notification of 4,096 bytes, its sender and id.
SLOT_BYTES = 8192
#: Rails of one link, and devices of one node.
MAX_RAILS = 64
_LENGTH = struct.Struct("!I")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
#: 8 groups of 4 hex digits, as the kernel writes it.
GidText = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{4}(:[0-9a-f]{4}){7}\Z")]
U24 = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nonce = Annotated[bytes, msgspec.Meta(max_length=NONCE_BYTES)]
ProofBytes = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
RailNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RAILS)]


class HandshakeError(Exception):
    """Bytes of the other side that are no message of this handshake."""


class RailEnd(msgspec.Struct, frozen=True):
    """One end of a rail, described for the other end."""

    gid: GidText
    queue_pair: U24
    #: The first packet's sequence number.
    psn: U24
    #: Code of the path MTU in the verbs API.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    #: Reads that may be outstanding.
    max_reads: Annotated[int, msgspec.Meta(ge=0, le=255)]


class RdmaHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message: the segment that the initiator wants."""

    version: int
    segment: Name
    generation: U63
    nonce: Nonce = b""


class RdmaWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The owner's segment and devices; nothing follows a refusal."""

    segment: Name
    generation: U63
    #: GIDs by device name.
    devices: Annotated[dict[Name, GidText], msgspec.Meta(max_length=MAX_RAILS)] = {}
    refused: Text = ""
    nonce: Nonce = b""


class InitiatorProof(msgspec.Struct, frozen=True, tag="prove"):
    """The proof that the initiator knows the cluster key."""

    proof: ProofBytes


class OwnerProof(msgspec.Struct, frozen=True, tag="proven"):
    """The proof that the owner knows the cluster key, or the reason of a refusal."""

    proof: ProofBytes | None = None
    refused: Text = ""


class ConnectRail(msgspec.Struct, frozen=True, tag="connect"):
    """A request to connect the owner's end of a rail to an end of the initiator."""

    rail: RailNumber
    device: Name
    end: RailEnd


class NotificationSlot(msgspec.Struct, frozen=True):
    """The address of `SLOT_BYTES` for notifications to the owner."""

    address: U64
    rkey: U32


class RailConnected(msgspec.Struct, frozen=True, tag="connected"):
    """The owner's end of a rail, connected."""

    end: RailEnd
    slot: NotificationSlot


class FenceRail(msgspec.Struct, frozen=True, tag="fence"):
    """A request to drop all packets of a failed rail, so that they can't land later."""

    rail: RailNumber


class RailFenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The answer that no packet of a rail lands any more."""


class RdmaRegionRequest(msgspec.Struct, frozen=True, tag="ask"):
    """A request for the region of a key."""

    generation: U63
    key: Annotated[bytes, msgspec.Meta(max_length=64)]


class RdmaRegionGrant(msgspec.Struct, frozen=True, tag="granted"):
    """The address of a region, and its keys at each of the owner's devices."""

    address: U64
    length: U63
    writable: bool
    #: By device name.
    rkeys: Annotated[dict[Name, U32], msgspec.Meta(max_length=MAX_RAILS)]


class RdmaRegionDenial(msgspec.Struct, frozen=True, tag="denied"):
    """The refusal of a region: an `AccessStatus` and its detail."""

    status: AccessStatus
    detail: U63


class RdmaFailure(msgspec.Struct, frozen=True, tag="failed"):
    """An error of the owner."""

    reason: Text


class NotificationResult(msgspec.Struct, frozen=True, tag="noted"):
    """The result of a notification: an `AccessStatus` (OK: it is queued) and its detail."""

    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    status: AccessStatus
    detail: U63 = 0


RdmaRequest = RdmaHello | InitiatorProof | ConnectRail | FenceRail | RdmaRegionRequest
RdmaReply = (
    RdmaWelcome
    | OwnerProof
    | RailConnected
    | RailFenced
    | RdmaRegionGrant
    | RdmaRegionDenial
    | RdmaFailure
    | NotificationResult
)

_requests: msgspec.msgpack.Decoder[RdmaRequest] = msgspec.msgpack.Decoder(RdmaRequest)
_replies: msgspec.msgpack.Decoder[RdmaReply] = msgspec.msgpack.Decoder(RdmaReply)


def encode(message: RdmaRequest | RdmaReply) -> bytes:
    """Encode a whole frame."""
    body = msgspec.msgpack.encode(message)
    assert 0 < len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


def proof_transcript(message: RdmaRequest | RdmaReply) -> bytes:
    """Return the bytes of a message over which proofs are made."""
    return msgspec.msgpack.encode(message)


def body_bytes(header: "bytes | memoryview") -> int:
    """Return the length of the body that follows.

    Raises:
        HandshakeError: no message has that length.
    """
    (n_bytes,) = _LENGTH.unpack(header)
    if not 0 < n_bytes <= MAX_FRAME_BYTES:
        raise HandshakeError(f"a message of {n_bytes} bytes; 1 to {MAX_FRAME_BYTES} are allowed")
    return int(n_bytes)


def decode_request(body: "bytes | memoryview") -> RdmaRequest:
    """Decode an initiator's message.

    Raises:
        HandshakeError: it is no request.
    """
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a request: {error}") from None


def decode_reply(body: "bytes | memoryview") -> RdmaReply:
    """Decode an owner's message.

    Raises:
        HandshakeError: it is no reply.
    """
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a reply: {error}") from None


def receive_body(sock: socket.socket) -> memoryview:
    """Receive one frame's body.

    Raises:
        HandshakeError: no message has its length.
        OSError: the connection broke or stalled.
    """
    return receive(sock, body_bytes(receive(sock, _LENGTH.size)))


def send_request(sock: socket.socket, request: RdmaRequest) -> RdmaReply:
    """Send one request and return its answer.

    Raises:
        HandshakeError: the answer is no reply.
        OSError: the connection broke or stalled.
    """
    send_all(sock, [encode(request)])
    return decode_reply(receive_body(sock))
