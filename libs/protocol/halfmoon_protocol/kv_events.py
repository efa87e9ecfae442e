"""Encode and decode KV events, which say what a cache stores and removes, in vLLM's format.

A publication has three frames: topic, sequence number (8 bytes, big-endian), and a MessagePack
array ``[ts, [event, …], data_parallel_rank | nil]``. An event is a map with its name under
``"type"`` (vLLM since June 2026) or an array that starts with its name (vLLM before, SGLang).
Halfmoon writes maps and reads both. It ignores unknown fields and elements.

Decoding skips ``token_ids``: an index needs the hashes alone, and the tokens of a block are 100
times as many bytes. ``halfmoon_servers.kv_events`` decodes the events of servers, whose tokens
are hashed.
"""

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import MAX_ITEMS, unit
from halfmoon_protocol.errors import MalformedMessage

#: Events of one publication. Halfmoon's own have at most 512.
MAX_EVENTS = 65_536


_Hash = Annotated[int, unit("hash")] | Annotated[bytes, Meta(max_length=MAX_ITEMS)]
_Hashes = Annotated[tuple[_Hash, ...], Meta(max_length=MAX_ITEMS)]
_TokenIds = Annotated[tuple[Annotated[int, unit("token id")], ...], Meta(max_length=MAX_ITEMS)]
_Medium = Annotated[str, Meta(max_length=MAX_ITEMS)]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks were added to a cache, each the child of the block before it."""

    #: In prefix order. Halfmoon's are byte strings, other caches' may be integers.
    block_hashes: _Hashes
    #: Hash of the block before the first one; none for the start of a prompt.
    parent_block_hash: _Hash | None
    #: Of all these blocks, one after another. Empty if the sender leaves them out, and in every
    #: decoded event.
    token_ids: _TokenIds
    #: Tokens of each block.
    block_size: Annotated[int, unit("tokens")]
    #: Adapter that the blocks were computed with; none: no adapter. Halfmoon has none.
    lora_id: Annotated[int, unit("index")] | None = None
    #: "GPU", "CPU" or "STORAGE".
    medium: _Medium | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks left a cache."""

    #: In any order.
    block_hashes: _Hashes
    #: As in `BlockStored`.
    medium: _Medium | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """A cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True):
    """The events of one publication."""

    sequence: int
    timestamp: float
    events: tuple[KvEvent, ...]


def encode_sequence(sequence: int) -> bytes:
    """Encode the second frame."""
    return struct.pack(">q", sequence)


def decode_sequence(frame: bytes) -> int:
    """Decode the second frame.

    Raises:
        MalformedMessage: not 8 bytes.
    """
    if len(frame) != 8:
        raise MalformedMessage(f"a KV event sequence number of {len(frame)} bytes, not 8")
    (sequence,) = struct.unpack(">q", frame)
    return int(sequence)


def encode_payload(events: Sequence[KvEvent], timestamp: float) -> bytes:
    """Encode the third frame, with events as maps."""
    return msgspec.msgpack.encode((timestamp, events, None))


def decode_payload(payload: bytes, sequence: int) -> KvEventBatch:
    """Decode the third frame without its tokens; leave out events of unknown kinds.

    Raises:
        MalformedMessage: not of the form above, or over `MAX_EVENTS`.
    """
    try:
        try:
            known = _KNOWN_MAPS.decode(payload)
        except msgspec.ValidationError:  # arrays, or kinds that Halfmoon does not know
            mixed = _ANY_ROWS.decode(payload)
            rows = (_decode_row(row) for row in mixed.events)
            return KvEventBatch(
                sequence, mixed.timestamp, tuple(event for event in rows if event is not None)
            )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a KV event batch: {error}") from None
    return KvEventBatch(sequence, known.timestamp, tuple([_event(row) for row in known.events]))


# -- rows of a payload -------------------------------------------------------------------------


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """`BlockStored` as a map, without `token_ids`: msgspec skips their bytes."""

    block_hashes: tuple[int | bytes, ...]
    parent_block_hash: int | bytes | None
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _StoredArray(msgspec.Struct, tag_field="type", tag="BlockStored", array_like=True):
    """`BlockStored` as an array, with its `token_ids` as bytes of the payload."""

    block_hashes: tuple[int | bytes, ...]
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _RemovedArray(msgspec.Struct, tag_field="type", tag="BlockRemoved", array_like=True):
    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", array_like=True):
    pass


class _MapKind(msgspec.Struct):
    type: str = ""


class _ArrayKind(msgspec.Struct, array_like=True):
    type: str


_MapRow = _StoredMap | BlockRemoved | AllBlocksCleared
_ArrayRow = _StoredArray | _RemovedArray | _ClearedArray


class _KnownMaps(msgspec.Struct, array_like=True):
    timestamp: float
    events: Annotated[tuple[_MapRow, ...], Meta(max_length=MAX_EVENTS)]


class _AnyRows(msgspec.Struct, array_like=True):
    timestamp: float
    events: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_EVENTS)]


_KNOWN_MAPS = msgspec.msgpack.Decoder(_KnownMaps)
_ANY_ROWS = msgspec.msgpack.Decoder(_AnyRows)
_MAP_ROW: msgspec.msgpack.Decoder[_MapRow] = msgspec.msgpack.Decoder(_MapRow)
_ARRAY_ROW: msgspec.msgpack.Decoder[_ArrayRow] = msgspec.msgpack.Decoder(_ArrayRow)
_MAP_KIND = msgspec.msgpack.Decoder(_MapKind)
_ARRAY_KIND = msgspec.msgpack.Decoder(_ArrayKind)
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def _decode_row(raw: msgspec.Raw) -> KvEvent | None:
    row = memoryview(raw)
    is_array = row[0] & 0xF0 == 0x90 or row[0] in (0xDC, 0xDD)
    kind = _ARRAY_KIND.decode(row).type if is_array else _MAP_KIND.decode(row).type
    if kind not in _KINDS:
        return None
    return _event(_ARRAY_ROW.decode(row) if is_array else _MAP_ROW.decode(row))


def _event(row: _MapRow | _ArrayRow) -> KvEvent:
    match row:
        case BlockRemoved() | AllBlocksCleared():
            return row
        case _RemovedArray():
            return BlockRemoved(block_hashes=row.block_hashes, medium=row.medium)
        case _ClearedArray():
            return AllBlocksCleared()
        case _StoredMap() | _StoredArray():
            return BlockStored(
                block_hashes=row.block_hashes,
                parent_block_hash=row.parent_block_hash,
                token_ids=(),
                block_size=row.block_size,
                lora_id=row.lora_id,
                medium=row.medium,
            )
