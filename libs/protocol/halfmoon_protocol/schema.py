"""Write the files that other languages need: JSON Schema of all messages, and golden bytes.

python -m halfmoon_protocol.schema            write libs/protocol/{schema,golden}
python -m halfmoon_protocol.schema --check    fail if they are not what would be written
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from halfmoon_protocol import blocks, codec, kv_events
from halfmoon_protocol.examples import EXAMPLES, HASHES
from halfmoon_protocol.messages import AnyMessage, WorkerInfo

_HOME = Path(__file__).resolve().parent.parent


def artefacts() -> dict[str, str]:
    """Return the text of every generated file, by its path below libs/protocol."""
    return {
        "schema/messages.json": _pretty(_schema()),
        "golden/messages.json": _pretty(_golden_messages()),
        "golden/block_hashes.json": _pretty(_golden_hashes()),
        "golden/kv_events.json": _pretty(_golden_kv_events()),
    }


def _schema() -> dict[str, Any]:
    """Return the JSON Schema of `AnyMessage` and of the member record; bytes are base64 strings."""
    (message, worker), definitions = msgspec.json.schema_components(
        [AnyMessage, WorkerInfo], ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Halfmoon messages, version {codec.VERSION}",
        **message,
        "$defs": {**definitions, "MemberRecord": worker},
    }


def _golden_messages() -> list[dict[str, Any]]:
    """Return one frame per message: hexadecimal bytes, and the same message as JSON."""
    return [
        {
            "type": type(message).__struct_config__.tag,
            "frame_hex": codec.encode(message).hex(),
            "json": msgspec.to_builtins(message),
        }
        for message in EXAMPLES
    ]


def _golden_hashes() -> list[dict[str, Any]]:
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


def _golden_kv_events() -> list[dict[str, Any]]:
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


def _pretty(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the files, and return the exit status."""
    stale = [
        path
        for path, text in artefacts().items()
        if not (_HOME / path).exists() or (_HOME / path).read_text() != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"libs/protocol/{path} is not what the messages say: run `make schema`")
        return 1 if stale else 0
    for path in stale:
        (_HOME / path).parent.mkdir(exist_ok=True)
        (_HOME / path).write_text(artefacts()[path])
        print(f"wrote libs/protocol/{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
