"""Make the JSON Schema of all messages and of the member record.

msgspec states types, limits and units. Added here: what each field means, from the comment above
it; the names of the positions of structs that are arrays; and the tag of each message.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from halfmoon_protocol import codec, kv_events
from halfmoon_protocol.messages import AnyMessage, WorkerInfo
from halfmoon_protocol.schema.field_docs import field_docs

Schema = dict[str, Any]
Described = msgspec.inspect.StructType | msgspec.inspect.DataclassType

_ABOUT = """One message of a frame, as a MessagePack map; byte strings are base64 in JSON. \
`x-unit` is the unit of a number. `format` is int64 or uint64 where a number may be over 2^53."""


def message_schema() -> Schema:
    """Return the JSON Schema of `AnyMessage`, with the member record as `MemberRecord`."""
    (message, worker), definitions = msgspec.json.schema_components(
        [AnyMessage, WorkerInfo], ref_template="#/$defs/{name}"
    )
    for kind in described_types(AnyMessage):
        describe_fields(kind, definitions[kind.cls.__name__])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Halfmoon messages, version {codec.VERSION}",
        "description": _ABOUT,
        **message,
        "$defs": {
            **definitions,
            "MemberRecord": {"description": "A worker's record in the metadata server.", **worker},
        },
    }


def kv_event_schema() -> Schema:
    """Return the JSON Schema of the payload of KV events, as Halfmoon writes it."""
    (event,), definitions = msgspec.json.schema_components(
        [kv_events.KvEvent], ref_template="#/$defs/{name}"
    )
    for kind in described_types(kv_events.KvEvent):
        describe_fields(kind, definitions[kind.cls.__name__])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Halfmoon KV events",
        "description": "The third frame of a publication of KV events, as a MessagePack array.",
        "$ref": "#/$defs/KvEventPayload",
        "$defs": {
            **definitions,
            "KvEventPayload": {
                "type": "array",
                "description": "When it was published, the events in their order, and nothing.",
                "prefixItems": [
                    {
                        "title": "timestamp",
                        "description": "Seconds since 1970 by the publisher's clock.",
                        "type": "number",
                        "x-unit": "s",
                    },
                    {
                        "title": "events",
                        "description": "The events, in their order.",
                        "type": "array",
                        "items": event,
                        "maxItems": kv_events.MAX_EVENTS,
                    },
                    {
                        "title": "data_parallel_rank",
                        "description": "Rank of the publisher; Halfmoon has none.",
                        "anyOf": [{"type": "integer", "x-unit": "index"}, {"type": "null"}],
                    },
                ],
                "minItems": 2,
            },
        },
    }


def describe_fields(kind: Described, definition: Schema) -> None:
    """Add to a type's schema what the comments above its fields say."""
    docs, config = field_docs(kind.cls), getattr(kind.cls, "__struct_config__", None)
    if config is not None and config.array_like:
        schemas = definition["prefixItems"]
        for field, schema in zip(kind.fields, schemas, strict=True):
            schema["title"] = field.name
    else:
        schemas = [definition["properties"][field.encode_name] for field in kind.fields]
    for field, schema in zip(kind.fields, schemas, strict=True):
        if field.name in docs:
            schema["description"] = docs[field.name]
    if config is not None and config.tag:
        definition["properties"]["type"] = {"const": config.tag, "description": "Names the type."}


def described_types(kind: Any) -> Iterator[Described]:
    """Yield each struct and dataclass that a type is made of, once."""
    seen: set[type] = set()
    waiting: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    while waiting:
        match waiting.pop():
            case msgspec.inspect.StructType() | msgspec.inspect.DataclassType() as found:
                if found.cls not in seen:
                    seen.add(found.cls)
                    yield found
                    waiting += [field.type for field in found.fields]
            case msgspec.inspect.UnionType(types=types):
                waiting += types
            case msgspec.inspect.VarTupleType(item_type=item):
                waiting.append(item)
            case msgspec.inspect.ListType(item_type=item):
                waiting.append(item)
            case msgspec.inspect.DictType(value_type=value):
                waiting.append(value)
            case msgspec.inspect.TupleType(item_types=items):
                waiting += items
            case msgspec.inspect.Metadata(type=inner):
                waiting.append(inner)
