"""Decode the payload of a server's KV event batch: MessagePack ``[ts, [event, …], rank | nil]``.

An event is a map with its name under ``"type"`` (vLLM since June 2026), or an array that starts
with its name (vLLM before, SGLang). Unknown keys and further elements are ignored; events of
unknown kinds are skipped and counted. The bytes may be hostile: sizes are bounded before anything
is allocated for them.
"""

from typing import Any

import msgspec

from halfmoon_protocol.errors import MalformedMessage
from halfmoon_servers.kv_events.server_events import (
    ServerBlockRemoved,
    ServerBlockStored,
    ServerCacheCleared,
    ServerEvent,
)

#: Bytes of a payload: a step of a server stores a few prompts, each token takes up to 5 bytes.
MAX_PAYLOAD_BYTES = 16 * 2**20
#: Events of a payload: a server removes blocks one by one.
MAX_BATCH_EVENTS = 262_144


class ServerEventBatch(msgspec.Struct, frozen=True):
    """The events of one payload that Halfmoon knows."""

    timestamp: float
    events: tuple[ServerEvent, ...]
    #: Events of kinds that Halfmoon does not know.
    n_unknown: int = 0


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: tuple[msgspec.Raw, ...]


class _MapKind(msgspec.Struct, frozen=True):
    type: str


class _ArrayKind(msgspec.Struct, frozen=True, array_like=True):
    type: str


class _Elements(msgspec.Struct, frozen=True, array_like=True):
    """The elements of an array that both vLLM and SGLang have had in this order."""

    type: str
    e1: Any = None
    e2: Any = None
    e3: Any = None
    e4: Any = None
    e5: Any = None
    e6: Any = None
    e7: Any = None
    e8: Any = None
    e9: Any = None
    e10: Any = None


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP_KIND = msgspec.msgpack.Decoder(_MapKind)
_ARRAY_KIND = msgspec.msgpack.Decoder(_ArrayKind)
_ELEMENTS = msgspec.msgpack.Decoder(_Elements)
_KINDS: dict[str, type[ServerEvent]] = {
    "BlockStored": ServerBlockStored,
    "BlockRemoved": ServerBlockRemoved,
    "AllBlocksCleared": ServerCacheCleared,
}
_BY_MAP: dict[str, msgspec.msgpack.Decoder[ServerEvent]] = {
    name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()
}


def decode_server_payload(payload: bytes) -> ServerEventBatch:
    """Decode a payload.

    Raises:
        MalformedMessage: too large, or not of the form above; the text says what is wrong.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(
            f"a KV event payload of {len(payload)} bytes, over the limit of {MAX_PAYLOAD_BYTES}"
        )
    try:
        batch = _BATCH.decode(payload)
        if len(batch.events) > MAX_BATCH_EVENTS:
            raise MalformedMessage(
                f"a KV event payload of {len(batch.events)} events, over the limit of "
                f"{MAX_BATCH_EVENTS}"
            )
        events = tuple(
            event for raw in batch.events if (event := _decode_event(bytes(raw))) is not None
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a KV event payload: {error}") from None
    return ServerEventBatch(batch.ts, events, len(batch.events) - len(events))


def _decode_event(raw: bytes) -> ServerEvent | None:
    first = raw[0]
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):  # a MessagePack array
        name = _ARRAY_KIND.decode(raw).type
        return _from_array(_KINDS[name], raw) if name in _KINDS else None
    decoder = _BY_MAP.get(_MAP_KIND.decode(raw).type)
    return None if decoder is None else decoder.decode(raw)


def _from_array(kind: type[ServerEvent], raw: bytes) -> ServerEvent:
    elements = msgspec.structs.astuple(_ELEMENTS.decode(raw))[1:]
    fields = dict(zip(kind.__struct_fields__, elements, strict=False))
    return msgspec.convert({"type": kind.__struct_config__.tag, **fields}, kind)
