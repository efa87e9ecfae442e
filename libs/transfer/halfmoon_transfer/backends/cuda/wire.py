"""What goes over the Unix socket: asking for a region's handle, and what is said about it.

A SOCK_SEQPACKET socket in the abstract namespace, as `backends.shm` has; a message is a MessagePack
map with its kind under "type", at most 1,024 bytes. The asker sends `Ask`; the owner answers with
`Granted` or `Denied`, and says `Revoked` unasked when a region that it granted is gone. When the
connection closes, the owner is gone.
"""

import secrets

import msgspec

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.devices.interface import IpcHandle
from halfmoon_transfer.regions import Status

MAX_BYTES = 1024
#: Not the process's number: containers that share a network may each have the same one.
THIS_PROCESS = secrets.token_hex(16)


class WireError(ValueError):
    """What came is not one of these messages."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """May I open this region?"""

    generation: int
    key: bytes


class Granted(msgspec.Struct, frozen=True, tag="granted"):
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


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """No; see `regions.Status`."""

    key: bytes
    status: Status
    detail: int


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """It is not registered any more."""

    key: bytes


Said = Granted | Denied | Revoked
_ask = msgspec.msgpack.Decoder(Ask)
_said = msgspec.msgpack.Decoder(Said)


def encode(message: Ask | Said) -> bytes:
    """The message's bytes."""
    return msgspec.msgpack.encode(message)


def decode_ask(message: bytes) -> Ask:
    """Read what a peer asks.

    Raises:
        WireError: it is nothing that can be asked.
    """
    try:
        ask = _ask.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a request for a region: {error}") from None
    if len(ask.key) != KEY_BYTES:
        raise WireError(f"a key of {len(ask.key)} bytes")
    return ask


def decode_said(message: bytes) -> Said:
    """Read what an owner says.

    Raises:
        WireError: it makes no sense.
    """
    try:
        said: Said = _said.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an answer about a region: {error}") from None
    if isinstance(said, Granted) and min(said.length, said.handle.offset, said.address) < 0:
        raise WireError("a grant with negative numbers")
    return said
