"""Make the golden files: bytes that an implementation in any language must read and write."""

from collections.abc import Iterator
from typing import Any

import msgspec

from halfmoon_protocol import blocks, codec, kv_events
from halfmoon_protocol.examples import EXAMPLES, HASHES, LARGEST_INTEGERS

#: JavaScript holds larger integers inexactly.
MAX_JSON_INTEGER = 2**53 - 1


def golden_messages() -> list[dict[str, Any]]:
    """Return one frame per message: hexadecimal bytes, and the same message as JSON."""
    return [
        {
            "type": type(message).__struct_config__.tag,
            "frame_hex": codec.encode(message).hex(),
            "json": msgspec.to_builtins(message),
        }
        for message in EXAMPLES
    ]


def golden_largest_integers() -> list[dict[str, Any]]:
    """Return frames with integers that JSON can't carry to every language.

    Each comes with the JSON pointers of its integers over 2^53 - 1, and these in hexadecimal.
    """
    return [
        {
            "type": type(message).__struct_config__.tag,
            "frame_hex": codec.encode(message).hex(),
            "integers_hex": {
                pointer: f"{value:x}" for pointer, value in _large(msgspec.to_builtins(message))
            },
        }
        for message in LARGEST_INTEGERS
    ]


def _large(value: Any, pointer: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _large(item, f"{pointer}/{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _large(item, f"{pointer}/{i}")
    elif isinstance(value, int) and value > MAX_JSON_INTEGER:
        yield pointer, value


def golden_hashes() -> list[dict[str, Any]]:
    """Return prompts, and the hashes of their blocks."""
    cases: list[tuple[list[int], str, str, int]] = [
        (list(range(40)), "sha256:0f1e2d", "", 16),
        (list(range(40)), "sha256:0f1e2d", "tenant-a", 16),
        ([7] * 1024, "m", "ключ", 512),
        ([1, 2, 3], "m", "", 16),
        ([2**32 - 1] * 16, "m", "", 16),
    ]
    return [
        {
            "model": model,
            "salt": salt,
            "block_size": size,
            "token_ids": tokens,
            "root_hex": blocks.root_hash(model=model, salt=salt, block_size=size).hex(),
            "hashes_hex": [
                block.hex()
                for block in blocks.block_hashes(tokens, model=model, salt=salt, block_size=size)
            ],
        }
        for tokens, model, salt, size in cases
    ]


def golden_kv_events() -> list[dict[str, Any]]:
    """Return the frames of publications of KV events."""
    stored = kv_events.BlockStored(
        block_hashes=HASHES,
        parent_block_hash=None,
        token_ids=tuple(range(32)),
        block_size=16,
        medium="CPU",
    )
    removed = kv_events.BlockRemoved(block_hashes=HASHES[:1], medium="CPU")
    cleared = kv_events.AllBlocksCleared()
    batches: list[list[kv_events.KvEvent]] = [[stored], [removed, cleared], []]
    return [
        {
            "sequence_hex": kv_events.encode_sequence(sequence).hex(),
            "payload_hex": kv_events.encode_payload(events, 1795000000.25).hex(),
        }
        for sequence, events in enumerate(batches)
    ]
