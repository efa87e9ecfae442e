"""Decode the payload of a server's KV event batch: MessagePack ``[ts, [event, …], rank | nil]``.

An event is a map with its name under ``"type"`` (vLLM since June 2026), or an array that starts
with its name (vLLM before, SGLang). Unknown keys and further elements are ignored; events of
unknown kinds are skipped and counted. The bytes may be hostile: sizes are bounded before anything
is allocated for them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

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
        try:
            maps = _KNOWN_MAPS.decode(payload)
            return ServerEventBatch(maps.timestamp, maps.events)
        except msgspec.ValidationError:
            return _decode_other(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a KV event payload: {error}") from None


# -- rows of a payload -------------------------------------------------------------------------


class _StoredArray(ServerBlockStored, frozen=True, array_like=True):
    pass


class _RemovedArray(ServerBlockRemoved, frozen=True, array_like=True):
    pass


class _ClearedArray(ServerCacheCleared, frozen=True, array_like=True):
    pass


class _MapKind(msgspec.Struct, frozen=True):
    type: str


class _ArrayKind(msgspec.Struct, frozen=True, array_like=True):
    type: str


_ArrayRow = _StoredArray | _RemovedArray | _ClearedArray
_EVENTS_BOUND = Meta(max_length=MAX_BATCH_EVENTS)


class _KnownMaps(msgspec.Struct, frozen=True, array_like=True):
    timestamp: float
    events: Annotated[tuple[ServerEvent, ...], _EVENTS_BOUND]


class _KnownArrays(msgspec.Struct, frozen=True, array_like=True):
    timestamp: float
    events: Annotated[tuple[_ArrayRow, ...], _EVENTS_BOUND]


class _AnyRows(msgspec.Struct, frozen=True, array_like=True):
    timestamp: float
    events: tuple[msgspec.Raw, ...]


# Both of these read each token once.
_KNOWN_MAPS = msgspec.msgpack.Decoder(_KnownMaps)
_KNOWN_ARRAYS = msgspec.msgpack.Decoder(_KnownArrays)
_ANY_ROWS = msgspec.msgpack.Decoder(_AnyRows)
_MAP_ROW: msgspec.msgpack.Decoder[ServerEvent] = msgspec.msgpack.Decoder(ServerEvent)
_ARRAY_ROW: msgspec.msgpack.Decoder[_ArrayRow] = msgspec.msgpack.Decoder(_ArrayRow)
_MAP_KIND = msgspec.msgpack.Decoder(_MapKind)
_ARRAY_KIND = msgspec.msgpack.Decoder(_ArrayKind)
_KINDS: dict[str, type[ServerEvent]] = {
    "BlockStored": ServerBlockStored,
    "BlockRemoved": ServerBlockRemoved,
    "AllBlocksCleared": ServerCacheCleared,
}


def _decode_other(payload: bytes) -> ServerEventBatch:
    """Decode a payload with arrays, or with events of unknown kinds."""
    try:
        arrays = _KNOWN_ARRAYS.decode(payload)
    except msgspec.ValidationError:
        return _decode_mixed(payload)
    return ServerEventBatch(arrays.timestamp, tuple([_event(row) for row in arrays.events]))


def _decode_mixed(payload: bytes) -> ServerEventBatch:
    batch = _ANY_ROWS.decode(payload)
    if len(batch.events) > MAX_BATCH_EVENTS:
        raise MalformedMessage(
            f"a KV event payload of {len(batch.events)} events, over the limit of "
            f"{MAX_BATCH_EVENTS}"
        )
    events = tuple(event for raw in batch.events if (event := _decode_row(raw)) is not None)
    return ServerEventBatch(batch.timestamp, events, len(batch.events) - len(events))


def _decode_row(raw: msgspec.Raw) -> ServerEvent | None:
    row = memoryview(raw)
    is_array = row[0] & 0xF0 == 0x90 or row[0] in (0xDC, 0xDD)
    kind = _ARRAY_KIND.decode(row).type if is_array else _MAP_KIND.decode(row).type
    if kind not in _KINDS:
        return None
    return _event(_ARRAY_ROW.decode(row)) if is_array else _MAP_ROW.decode(row)


def _event(row: _ArrayRow) -> ServerEvent:
    kind = _KINDS[str(row.__struct_config__.tag)]
    return kind(**msgspec.structs.asdict(row))
