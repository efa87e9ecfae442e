"""Frames: one version byte, then one message as a MessagePack map.

    frame = u8 version | msgpack map with "type"

A frame of an unknown version, over the limit, or not one of our messages raises; whoever
reads a socket logs that and drops the frame.
"""

import msgspec

from halfmoon_protocol.errors import MalformedMessage, MessageTooLarge, UnknownVersion
from halfmoon_protocol.messages import AnyMessage, Message

VERSION = 1
#: A prompt of a million tokens fits; a peer that sends more is broken or hostile.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_VERSION_BYTE = bytes([VERSION])


def encode(message: Message) -> bytes:
    """One message as a frame.

    Raises:
        MessageTooLarge: it would be over `MAX_MESSAGE_BYTES`; the peer would drop it.
    """
    frame = _VERSION_BYTE + _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"a {type(message).__name__} of {len(frame)} bytes is over {MAX_MESSAGE_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> AnyMessage:
    """One frame as a message.

    Raises:
        MessageTooLarge: over `max_bytes`.
        UnknownVersion: another version than `VERSION`.
        Malformed: anything else that is not one of our messages.
    """
    if len(frame) > max_bytes:
        raise MessageTooLarge(f"a frame of {len(frame)} bytes is over {max_bytes}")
    if len(frame) == 0:
        raise MalformedMessage("an empty frame")
    if frame[0] != VERSION:
        raise UnknownVersion(f"a frame of version {frame[0]}, this build speaks {VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a message: {error}") from None
