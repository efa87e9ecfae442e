"""Encode and decode KV events, which say what a cache stores and removes, in vLLM's format.

A publication has three frames: topic, sequence number (8 bytes, big-endian), and a MessagePack
array ``[ts, [event, …], data_parallel_rank | nil]``. An event is a map with its name under
``"type"`` (vLLM since June 2026) or an array that starts with its name (vLLM before, SGLang).
Halfmoon writes maps and reads both. It ignores unknown fields and elements.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon_protocol.errors import MalformedMessage


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks were added to a cache, each the child of the block before it."""

    block_hashes: tuple[int | bytes, ...]
    parent_block_hash: int | bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    #: "GPU", "CPU" or "STORAGE".
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks left a cache."""

    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """A cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_BY_NAME: dict[str, type[KvEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


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
    rows = [
        {"type": type(event).__name__, **msgspec.to_builtins(event, builtin_types=(bytes,))}
        for event in events
    ]
    return msgspec.msgpack.encode([timestamp, rows, None])


def decode_payload(payload: bytes, sequence: int) -> KvEventBatch:
    """Decode the third frame; leave out events of unknown kinds.

    Raises:
        MalformedMessage: not of the form above.
    """
    try:
        parts: Any = msgspec.msgpack.decode(payload)
        timestamp, rows = float(parts[0]), parts[1]
        events = tuple(event for row in rows if (event := _decode_event(row)) is not None)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        TypeError,
        ValueError,
        LookupError,
        RecursionError,
    ) as error:
        raise MalformedMessage(f"not a KV event batch: {error}") from None
    return KvEventBatch(sequence, timestamp, events)


def _decode_event(row: Any) -> KvEvent | None:
    if isinstance(row, dict):
        kind = _BY_NAME.get(row.get("type", ""))
        fields = row
    else:
        kind = _BY_NAME.get(row[0])
        fields = dict(zip(kind.__struct_fields__, row[1:], strict=False)) if kind else {}
    return None if kind is None else msgspec.convert(fields, kind)
