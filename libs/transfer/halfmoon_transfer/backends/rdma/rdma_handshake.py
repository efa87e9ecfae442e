"""What is said on the side channel of an RDMA link: a TCP connection from initiator to owner.

    4 bytes length, big-endian, 1 to 65536 · one message in MessagePack, tagged by its kind

    Hello    -> Welcome     who is wanted, and which devices are here
    Prove    -> Proven      that both know the cluster key; only when both sent a nonce
    Connect  -> Connected   makes (or resets) the owner's end of one rail
    Fence    -> Fenced      the owner's end of a rail accepts no packet any more
    Ask      -> Granted     presents a region's key, gets where it is and its rkeys
             -> Denied      … or why not
    anything -> Failed      the owner could not; the connection goes on
    (notice) -> Noted       what became of a notice that came over a rail, see `notices`

A nonce is 32 random bytes of whoever has a cluster key (`cluster_key`), else empty. Proofs are
made over Hello and Welcome, encoded without their lengths. An owner that has a key refuses
hellos without a nonce, and answers nothing before the proof.

Each request has one answer, in order; a notice's comes before those of requests that were sent
after it had arrived. A connection that sends anything else is closed. The owner's ends live as
long as the connection.
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
#: An owner's room for a notice: a message of 4,096 bytes, its sender and id.
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
    """The other side sent something that is not our handshake."""


class RailEnd(msgspec.Struct, frozen=True):
    """One end of a rail, as the other end must know it."""

    gid: GidText
    queue_pair: U24
    #: The first packet's sequence number.
    psn: U24
    #: The verbs' number of the path MTU.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    #: Reads that may be outstanding.
    max_reads: Annotated[int, msgspec.Meta(ge=0, le=255)]


class RdmaHello(msgspec.Struct, frozen=True, tag="hello"):
    """Who is wanted."""

    version: int
    segment: Name
    generation: U63
    nonce: Nonce = b""


class RdmaWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Who is here; with a refusal nothing follows."""

    segment: Name
    generation: U63
    #: GIDs by device name.
    devices: Annotated[dict[Name, GidText], msgspec.Meta(max_length=MAX_RAILS)] = {}
    refused: Text = ""
    nonce: Nonce = b""


class InitiatorProof(msgspec.Struct, frozen=True, tag="prove"):
    """The initiator knows the cluster key."""

    proof: ProofBytes


class OwnerProof(msgspec.Struct, frozen=True, tag="proven"):
    """So does the owner; or not this one, with the reason."""

    proof: ProofBytes | None = None
    refused: Text = ""


class ConnectRail(msgspec.Struct, frozen=True, tag="connect"):
    """Connect the owner's end of this rail, on this device of the owner's, to this end."""

    rail: RailNumber
    device: Name
    end: RailEnd


class NotificationSlot(msgspec.Struct, frozen=True):
    """Where notices for the owner may be written; `SLOT_BYTES` of them."""

    address: U64
    rkey: U32


class RailConnected(msgspec.Struct, frozen=True, tag="connected"):
    """The owner's end."""

    end: RailEnd
    slot: NotificationSlot


class FenceRail(msgspec.Struct, frozen=True, tag="fence"):
    """This rail failed: drop what is still on the way, so that it can't land later."""

    rail: RailNumber


class RailFenced(msgspec.Struct, frozen=True, tag="fenced"):
    """Nothing lands any more."""


class RdmaRegionRequest(msgspec.Struct, frozen=True, tag="ask"):
    """The region of this key, please."""

    generation: U63
    key: Annotated[bytes, msgspec.Meta(max_length=64)]


class RdmaRegionGrant(msgspec.Struct, frozen=True, tag="granted"):
    """Where a region is, and what each of the owner's devices calls it."""

    address: U64
    length: U63
    writable: bool
    #: By device name.
    rkeys: Annotated[dict[Name, U32], msgspec.Meta(max_length=MAX_RAILS)]


class RdmaRegionDenial(msgspec.Struct, frozen=True, tag="denied"):
    """Not this region: a `AccessStatus` and its detail."""

    status: AccessStatus
    detail: U63


class RdmaFailure(msgspec.Struct, frozen=True, tag="failed"):
    """The owner could not, and says why."""

    reason: Text


class NotificationResult(msgspec.Struct, frozen=True, tag="noted"):
    """What became of a notice: a `AccessStatus` (OK: it is queued) and its detail."""

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
    """A whole frame."""
    body = msgspec.msgpack.encode(message)
    assert 0 < len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


def proof_transcript(message: RdmaRequest | RdmaReply) -> bytes:
    """What is proven: the message as both sides understand it."""
    return msgspec.msgpack.encode(message)


def body_bytes(header: "bytes | memoryview") -> int:
    """The length of the body that follows.

    Raises:
        HandshakeError: nobody of ours would send that.
    """
    (n_bytes,) = _LENGTH.unpack(header)
    if not 0 < n_bytes <= MAX_FRAME_BYTES:
        raise HandshakeError(f"a message of {n_bytes} bytes; 1 to {MAX_FRAME_BYTES} are allowed")
    return int(n_bytes)


def decode_request(body: "bytes | memoryview") -> RdmaRequest:
    """What an initiator says.

    Raises:
        HandshakeError: it is no request.
    """
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a request: {error}") from None


def decode_reply(body: "bytes | memoryview") -> RdmaReply:
    """What an owner answers.

    Raises:
        HandshakeError: it is no reply.
    """
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"not a reply: {error}") from None


def receive_body(sock: socket.socket) -> memoryview:
    """One frame's body.

    Raises:
        HandshakeError: its length makes no sense.
        OSError: the connection broke or stalled.
    """
    return receive(sock, body_bytes(receive(sock, _LENGTH.size)))


def send_request(sock: socket.socket, request: RdmaRequest) -> RdmaReply:
    """One request and its answer.

    Raises:
        HandshakeError: the answer is none.
        OSError: the connection broke or stalled.
    """
    send_all(sock, [encode(request)])
    return decode_reply(receive_body(sock))
