"""Encode and decode codec frames as plain maps."""

from typing import Any

import msgspec

from halfmoon_conform.verdict import CheckFailed
from halfmoon_protocol import codec
from halfmoon_protocol.errors import ProtocolError

#: A message as its map of fields, with its tag under "type".
WireMap = dict[str, Any]


def encode_map(message: WireMap) -> bytes:
    """Encode a message as a codec frame; its values are not checked."""
    return bytes([codec.VERSION]) + msgspec.msgpack.encode(message)


def decode_frame(frame: bytes) -> WireMap:
    """Decode a frame of the subject.

    Raises:
        CheckFailed: it is no message of the protocol.
    """
    try:
        codec.decode(frame)
    except ProtocolError as error:
        raise CheckFailed(f"sent a frame that is no message: {error}; {frame[:80]!r}") from None
    message: WireMap = msgspec.msgpack.decode(frame[1:])
    return message
