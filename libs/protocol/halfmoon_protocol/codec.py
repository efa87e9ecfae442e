"""Encode and decode frames: one version byte, then one message as a MessagePack map.

    frame = u8 version | msgpack map with "type"

Decoding raises for a frame of an unknown version, one over the limit, and one that is no message.
The caller that reads the socket logs that and drops the frame.
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
    """Encode a message as a frame.

    Raises:
        MessageTooLarge: over `MAX_MESSAGE_BYTES`; the peer would drop the frame.
    """
    frame = _VERSION_BYTE + _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"a {type(message).__name__} of {len(frame)} bytes is over {MAX_MESSAGE_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> AnyMessage:
    """Decode a frame.

    Raises:
        MessageTooLarge: over `max_bytes`.
        UnknownVersion: another version than `VERSION`.
        MalformedMessage: anything else that is not one of our messages.
    """
    if len(frame) > max_bytes:
        raise MessageTooLarge(f"a frame of {len(frame)} bytes is over {max_bytes}")
    if len(frame) == 0:
        raise MalformedMessage("an empty frame")
    if frame[0] != VERSION:
        text = f"a frame of version {frame[0]}, this build speaks {VERSION}"
        raise UnknownVersion(frame[0], text)
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a message: {error}") from None
