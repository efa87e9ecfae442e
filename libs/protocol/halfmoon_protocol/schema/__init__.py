"""Write the files that other languages need: JSON Schema, AsyncAPI, and golden bytes.

python -m halfmoon_protocol.schema            write libs/protocol/{schema,golden}
python -m halfmoon_protocol.schema --check    fail if they are not what would be written

It needs the extra ``halfmoon-protocol[schema]``, which reads the comments of fields.
"""

import json
from pathlib import Path
from typing import Any

from halfmoon_protocol.schema import golden_files
from halfmoon_protocol.schema.asyncapi import asyncapi_document
from halfmoon_protocol.schema.golden_draws import golden_draws
from halfmoon_protocol.schema.message_schema import kv_event_schema, message_schema
from halfmoon_protocol.schema.schema_faults import schema_faults

#: The folder of the files, ``libs/protocol``.
HOME = Path(__file__).resolve().parents[2]


def artefacts() -> dict[str, str]:
    """Return the text of every generated file, by its path below libs/protocol."""
    return {
        "schema/messages.json": _pretty(message_schema()),
        "schema/kv_events.json": _pretty(kv_event_schema()),
        "schema/asyncapi.json": _pretty(asyncapi_document()),
        "golden/messages.json": _pretty(golden_files.golden_messages()),
        "golden/largest_integers.json": _pretty(golden_files.golden_largest_integers()),
        "golden/block_hashes.json": _pretty(golden_files.golden_hashes()),
        "golden/kv_events.json": _pretty(golden_files.golden_kv_events()),
        "golden/draws.json": _pretty(golden_draws()),
    }


def _pretty(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the files, and return the exit status."""
    schemas = {"messages": message_schema(), "kv_events": kv_event_schema()}
    faults = [
        f"{name}.json: {fault}" for name, each in schemas.items() for fault in schema_faults(each)
    ]
    for fault in faults:
        print(f"libs/protocol/schema/{fault}")
    stale = {
        path: text
        for path, text in artefacts().items()
        if not (HOME / path).exists() or (HOME / path).read_text() != text
    }
    if "--check" in arguments:
        for path in stale:
            print(f"libs/protocol/{path} is not what the messages say: run `make schema`")
        return 1 if stale or faults else 0
    for path, text in stale.items():
        (HOME / path).parent.mkdir(exist_ok=True)
        (HOME / path).write_text(text)
        print(f"wrote libs/protocol/{path}")
    return 1 if faults else 0
