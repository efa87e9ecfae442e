"""Encode and decode the messages of the cuda backend on its Unix socket.

It is a SOCK_SEQPACKET socket in the abstract namespace. A message is a MessagePack map with its
kind under "type", at most 1,024 bytes. The initiator sends `CudaRegionRequest`, and the owner
answers with `CudaRegionGrant` or `CudaRegionDenial`. When a granted region is gone, the owner sends
`CudaRegionRevocation` without a request. When the connection closes, the owner is gone.
"""

import secrets

import msgspec

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.devices.device_interface import IpcHandle
from halfmoon_transfer.regions.access import AccessStatus

MAX_BYTES = 1024
#: Not the process's number: containers that share a network may use the same numbers.
THIS_PROCESS = secrets.token_hex(16)


class CudaWireError(ValueError):
    """Bytes that are none of these messages."""


class CudaRegionRequest(msgspec.Struct, frozen=True, tag="ask"):
    """A request to open a region."""

    generation: int
    key: bytes


class CudaRegionGrant(msgspec.Struct, frozen=True, tag="granted"):
    """The handle of a region."""

    key: bytes
    length: int
    writable: bool
    #: Identity of the device, the same in all processes of the host.
    device: str
    handle: IpcHandle
    #: `THIS_PROCESS` of the owner. Within one process its address is used, as the driver refuses
    #: the handle there.
    process: str
    address: int


class CudaRegionDenial(msgspec.Struct, frozen=True, tag="denied"):
    """A refusal, with its status and detail."""

    key: bytes
    status: AccessStatus
    detail: int


class CudaRegionRevocation(msgspec.Struct, frozen=True, tag="revoked"):
    """The message that a region is not registered any more."""

    key: bytes


CudaReply = CudaRegionGrant | CudaRegionDenial | CudaRegionRevocation
_request_decoder = msgspec.msgpack.Decoder(CudaRegionRequest)
_reply_decoder = msgspec.msgpack.Decoder(CudaReply)


def encode(message: CudaRegionRequest | CudaReply) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def decode_request(message: bytes) -> CudaRegionRequest:
    """Decode a peer's request.

    Raises:
        CudaWireError: it is no request.
    """
    try:
        request = _request_decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CudaWireError(f"not a request for a region: {error}") from None
    if len(request.key) != KEY_BYTES:
        raise CudaWireError(f"a key of {len(request.key)} bytes")
    return request


def decode_reply(message: bytes) -> CudaReply:
    """Decode an owner's message.

    Raises:
        CudaWireError: it is no such message.
    """
    try:
        reply: CudaReply = _reply_decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CudaWireError(f"not an answer about a region: {error}") from None
    if (
        isinstance(reply, CudaRegionGrant)
        and min(reply.length, reply.handle.offset, reply.address) < 0
    ):
        raise CudaWireError("a grant with negative numbers")
    return reply
