"""Find what the schema leaves out: descriptions, units, limits, and names of positions."""

from collections.abc import Iterator
from typing import Any

from halfmoon_protocol.schema.units import UNITS


def schema_faults(schema: dict[str, Any]) -> list[str]:
    """Return a line for each field that a reader of the schema would have to guess about."""
    faults = []
    for name, definition in schema["$defs"].items():
        if "description" not in definition:
            faults.append(f"{name}: no docstring says what it is")
        for field, of_field in definition.get("properties", {}).items():
            faults += _field_faults(f"{name}.{field}", of_field)
        for i, of_field in enumerate(definition.get("prefixItems", ())):
            if "title" not in of_field:
                faults.append(f"{name}[{i}]: no title")
            faults += _field_faults(f"{name}[{i}]", of_field)
    return faults


def _field_faults(where: str, schema: dict[str, Any]) -> Iterator[str]:
    if not any(each.get("description") for each in (schema, *schema.get("anyOf", ()))):
        yield f"{where}: no description; write a `#:` comment above the field"
    yield from _value_faults(where, schema)


def _position_faults(where: str, schema: dict[str, Any]) -> Iterator[str]:
    if "title" not in schema:
        yield f"{where}: no title; name the position by msgspec.Meta(title=…)"
    yield from _value_faults(where, schema)


def _value_faults(where: str, schema: dict[str, Any]) -> Iterator[str]:
    """Yield what a value's schema leaves out, without a description of its own."""
    for choice in schema.get("anyOf", ()):
        yield from _value_faults(where, choice)
    match schema.get("type"):
        case "integer" | "number" if "enum" not in schema:
            if schema.get("x-unit") not in UNITS:
                yield f"{where}: no unit of {', '.join(UNITS)}; see bounds.unit"
        case "string":
            if not schema.keys() & {"maxLength", "pattern", "enum", "const"}:
                yield f"{where}: a text without a longest length; see bounds.MAX_ITEMS"
        case "array":
            positions = schema.get("prefixItems", ())
            for i, position in enumerate(positions):
                yield from _position_faults(f"{where}[{i}]", position)
            if not positions:
                if "maxItems" not in schema:
                    yield f"{where}: a list without a longest length; see bounds.MAX_ITEMS"
                yield from _value_faults(f"{where}[]", schema["items"])
