"""What goes over the Unix socket: asking for a region's handle, and what is said about it.

A SOCK_SEQPACKET socket in the abstract namespace, as `backends.shm` has; a message is a MessagePack
map with its kind under "type", at most 1,024 bytes. The asker sends `CudaRegionRequest`; the owner
answers with
`CudaRegionGrant` or `CudaRegionDenial`, and says `CudaRegionRevocation` unasked when a region that
it granted is gone. When the
connection closes, the owner is gone.
"""

import secrets

import msgspec

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.devices.device_interface import IpcHandle
from halfmoon_transfer.regions.access import AccessStatus

MAX_BYTES = 1024
#: Not the process's number: containers that share a network may each have the same one.
THIS_PROCESS = secrets.token_hex(16)


class CudaWireError(ValueError):
    """What came is not one of these messages."""


class CudaRegionRequest(msgspec.Struct, frozen=True, tag="ask"):
    """May I open this region?"""

    generation: int
    key: bytes


class CudaRegionGrant(msgspec.Struct, frozen=True, tag="granted"):
    """Yes, and how."""

    key: bytes
    length: int
    writable: bool
    #: The device, by the name that all processes of the host know.
    device: str
    handle: IpcHandle
    #: `THIS_PROCESS` of the owner. Within one process its address does, and the driver refuses
    #: the handle.
    process: str
    address: int


class CudaRegionDenial(msgspec.Struct, frozen=True, tag="denied"):
    """No; see `regions.Status`."""

    key: bytes
    status: AccessStatus
    detail: int


class CudaRegionRevocation(msgspec.Struct, frozen=True, tag="revoked"):
    """It is not registered any more."""

    key: bytes


CudaReply = CudaRegionGrant | CudaRegionDenial | CudaRegionRevocation
_ask = msgspec.msgpack.Decoder(CudaRegionRequest)
_said = msgspec.msgpack.Decoder(CudaReply)


def encode(message: CudaRegionRequest | CudaReply) -> bytes:
    """The message's bytes."""
    return msgspec.msgpack.encode(message)


def decode_request(message: bytes) -> CudaRegionRequest:
    """Read what a peer asks.

    Raises:
        WireError: it is nothing that can be asked.
    """
    try:
        ask = _ask.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CudaWireError(f"not a request for a region: {error}") from None
    if len(ask.key) != KEY_BYTES:
        raise CudaWireError(f"a key of {len(ask.key)} bytes")
    return ask


def decode_reply(message: bytes) -> CudaReply:
    """Read what an owner says.

    Raises:
        WireError: it makes no sense.
    """
    try:
        said: CudaReply = _said.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CudaWireError(f"not an answer about a region: {error}") from None
    if isinstance(said, CudaRegionGrant) and min(said.length, said.handle.offset, said.address) < 0:
        raise CudaWireError("a grant with negative numbers")
    return said
