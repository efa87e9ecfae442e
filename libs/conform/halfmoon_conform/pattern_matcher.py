"""Compare a received value with a pattern, and say where they differ. Pure.

A map matches a map that has its keys, further keys are free; a list matches element by element; a
map with one key that begins with `$` is a matcher; any other value matches an equal one.
"""

from collections.abc import Callable
from typing import Any

Pattern = Any


def difference(pattern: Pattern, value: Any, at: str = "") -> str:
    """Return how a value differs from a pattern; empty: it matches."""
    if isinstance(pattern, dict):
        if len(pattern) == 1 and (name := next(iter(pattern))) in _MATCHERS:
            return _MATCHERS[name](pattern[name], value, at)
        return _map_difference(pattern, value, at)
    if isinstance(pattern, list | tuple):
        return _list_difference(list(pattern), value, at)
    same = type(pattern) is type(value) or not isinstance(pattern, bool)
    return "" if same and pattern == value else f"{at or 'it'} is {value!r}, not {pattern!r}"


def _map_difference(pattern: dict[str, Any], value: Any, at: str) -> str:
    if not isinstance(value, dict):
        return f"{at or 'it'} is {value!r}, not a map"
    for key, inner in pattern.items():
        where = f"{at}.{key}" if at else str(key)
        if inner == {"$absent": True}:
            if key in value:
                return f"{where} is {value[key]!r}, and should be left out"
        elif key not in value:
            # A field that is left out has its default; for most types that is an empty value.
            if inner in ("", [], 0, False, None) and not isinstance(inner, dict):
                continue
            return f"{where} is missing"
        elif found := difference(inner, value[key], where):
            return found
    return ""


def _list_difference(pattern: list[Any], value: Any, at: str) -> str:
    if not isinstance(value, list | tuple):
        return f"{at or 'it'} is {value!r}, not a list"
    if len(pattern) != len(value):
        return f"{at or 'it'} has {len(value)} elements, not {len(pattern)}"
    found = (difference(p, v, f"{at}[{i}]") for i, (p, v) in enumerate(zip(pattern, value)))  # noqa: B905
    return next(filter(None, found), "")


def _number(compare: Callable[[Any, Any], bool], words: str) -> Callable[[Any, Any, str], str]:
    def matcher(limit: Any, value: Any, at: str) -> str:
        fine = isinstance(value, int | float) and compare(value, limit)
        return "" if fine else f"{at} is {value!r}, not {words} {limit!r}"

    return matcher


def _any(_: Any, __: Any, ___: str) -> str:
    return ""


def _length(length: Any, value: Any, at: str) -> str:
    if not hasattr(value, "__len__"):
        return f"{at} is {value!r}, which has no length"
    found = difference(length, len(value), f"the length of {at}")
    return found and f"{found} ({value!r:.120})"


def _one_of(choices: Any, value: Any, at: str) -> str:
    if any(not difference(each, value) for each in choices):
        return ""
    return f"{at} is {value!r}, none of {choices!r}"


def _contains(text: Any, value: Any, at: str) -> str:
    try:
        return "" if text in value else f"{at} is {value!r}, without {text!r}"
    except TypeError:
        return f"{at} is {value!r}, which contains nothing"


def _not(pattern: Any, value: Any, at: str) -> str:
    return "" if difference(pattern, value, at) else f"{at} is {value!r}"


_MATCHERS: dict[str, Callable[[Any, Any, str], str]] = {
    "$any": _any,
    "$at_least": _number(lambda value, limit: bool(value >= limit), "at least"),
    "$at_most": _number(lambda value, limit: bool(value <= limit), "at most"),
    "$above": _number(lambda value, limit: bool(value > limit), "above"),
    "$length": _length,
    "$one_of": _one_of,
    "$contains": _contains,
    "$not": _not,
}
#: The names of all matchers, for the document's test; `$absent` belongs to maps.
MATCHERS = frozenset({*_MATCHERS, "$absent"})
