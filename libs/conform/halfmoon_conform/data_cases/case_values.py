"""Fill in the values of a case: names of what earlier steps captured. Pure.

A text `$name`, `$name.part` or `$name.0` stands for a captured value or a part of it. `$id.x` is
an id of this run of the case, the same wherever the case says it. A map with one key `$hex`,
`$bytes`, `$text`, `$repeat` or `$concat` makes a value that YAML can't write.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from halfmoon_conform.blocks import BlockChain
from halfmoon_conform.verdict import CheckFailed

_NAME = re.compile(r"\$([a-z_][a-z0-9_]*)((?:\.[a-z0-9_]+)*)\Z")


class CaseError(ValueError):
    """A case that can't be run as it is written; the text names the place."""


class RunIds(Mapping[str, str]):
    """Ids of one run of a case, made at their first use."""

    def __init__(self, make: Callable[[str], str]) -> None:
        self._make = make
        self._made: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __contains__(self, _: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def fill(value: Any, known: Mapping[str, Any]) -> Any:
    """Return a value with everything filled in.

    Raises:
        CaseError: a name is not known.
        CheckFailed: what the subject said lacks a part.
    """
    match value:
        case str():
            return _named(value, known)
        case list():
            return [fill(each, known) for each in value]
        case {"$hex": text, **rest} if not rest:
            return bytes.fromhex(text)
        case {"$repeat": {"value": each, "times": times}, **rest} if not rest:
            return [fill(each, known)] * times
        case {"$bytes": n, **rest} if not rest:
            return bytes(n)
        case {"$text": {"value": each, "times": times}, **rest} if not rest:
            return each * times
        case {"$concat": parts, **rest} if not rest:
            filled = [fill(part, known) for part in parts]
            return [each for part in filled for each in part]
        case dict():
            return {key: fill(inner, known) for key, inner in value.items()}
    return value


def _named(text: str, known: Mapping[str, Any]) -> Any:
    found = _NAME.match(text)
    if found is None:
        return text
    name, parts = found.groups()
    if name not in known:
        raise CaseError(f"{text!r}: no step before captured {name!r}")
    value = known[name]
    for part in filter(None, parts.split(".")):
        try:
            if part.isdecimal():
                value = value[int(part)]
            else:
                value = value.field(part) if isinstance(value, BlockChain) else value[part]
        except (KeyError, IndexError, AttributeError, TypeError):
            raise CheckFailed(f"{text[1:]} is not there: no {part!r} in {value!r:.300}") from None
    return value
