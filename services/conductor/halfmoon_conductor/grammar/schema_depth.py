"""Bound the depth of a JSON schema, with its references followed.

The grammar library recurses from schema to subschema, and references may chain what looks flat.
Cycles are harmless: a recursive schema is compiled once, however deep its texts are.
"""

from typing import Any

#: Most nested objects and arrays of a schema, references followed. An object within an object
#: counts as two.
MAX_SCHEMA_DEPTH = 200


def check_depth(schema: dict[str, Any], limit: int = MAX_SCHEMA_DEPTH) -> None:
    """Check the depth of a schema, in time proportional to its size.

    Raises:
        ValueError: it is deeper than `limit`; the text names the limit.
    """
    #: Depth below each container by id; None while it is being computed.
    depths: dict[int, int | None] = {}
    stack: list[tuple[Any, bool]] = [(schema, False)]
    while stack:
        node, expanded = stack.pop()
        below = _below(node, schema)
        if not expanded:
            if id(node) in depths:
                continue
            depths[id(node)] = None
            stack.append((node, True))
            stack += [(each, False) for each in below if id(each) not in depths]
            continue
        # A container that is still being computed leads back here: a cycle adds no depth.
        depth = 1 + max((depths.get(id(each)) or 0 for each in below), default=0)
        depths[id(node)] = depth
        if depth > limit:
            raise ValueError(
                f"the schema is over {limit} levels deep, its references followed; "
                "make it flatter, or write a recursive schema that refers to itself"
            )


def _below(node: Any, root: dict[str, Any]) -> list[Any]:
    """Return the containers that a container leads to, directly or by a reference."""
    values = node.values() if isinstance(node, dict) else node
    found = [value for value in values if isinstance(value, dict | list)]
    reference = node.get("$ref") if isinstance(node, dict) else None
    if isinstance(reference, str) and reference.startswith("#"):
        target = _target(reference[1:], root)
        if target is not None:
            found.append(target)
    return found


def _target(pointer: str, root: dict[str, Any]) -> Any:
    """Return the container that a JSON pointer (RFC 6901) names; None if it is no container."""
    node: Any = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, dict | list) else None
