"""Find the parts of a configuration that describe the language model."""

from collections.abc import Iterator, Mapping
from typing import Any

#: Names of the part that describes the language model of one that reads images or sounds too.
_TEXT_PARTS = ("text_config", "llm_config")
#: Name of the part that reads and writes text, of a model that speaks as well.
_THINKER = "thinker_config"


def text_parts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the configuration and those nested in it of the language model, with their prefixes.

    The prefix stands before the names of a part's fields in messages: "" or "text_config.".
    """
    found: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    thinker = config.get(_THINKER)
    if isinstance(thinker, dict):
        found.append((f"{_THINKER}.", thinker))
    nested = [
        (f"{prefix}{name}.", part[name])
        for prefix, part in found
        for name in _TEXT_PARTS
        if isinstance(part.get(name), dict)
    ]
    return [*found, *nested]


def nested_parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the configuration and all objects in it at any depth, with their prefixes."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        prefix, part = waiting.pop(0)
        if isinstance(part, Mapping):
            yield prefix, part
            waiting += [(f"{prefix}{key}.", value) for key, value in part.items()]
        elif isinstance(part, list):
            waiting += [(prefix, value) for value in part if isinstance(value, Mapping | list)]
