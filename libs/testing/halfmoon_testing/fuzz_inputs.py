"""Read a fuzzer's number of inputs and its seed, and mutate bytes and JSON values."""

import os
import random
from typing import Any

#: Values that a field rarely has: of other types, at limits, and beyond.
ABSURD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    1_000,
    10**9,
    2**31,
    2**32 - 1,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
    10**40,
    0.0,
    -0.5,
    1.5,
    1e-300,
    1e308,
    "",
    "1",
    "\0",
    "\x1b[31m\n",
    "ü半🌗",
    "\ud800",
    "x" * 5_000,
    [],
    [0],
    [[]],
    [None, "a", {}],
    [1] * 300,
    {},
    {"a": {"b": []}},
    {"type": "text"},
)
#: Places deeper than this are not mutated.
_MAX_DEPTH = 40
_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


def n_fuzz_inputs(usual: int) -> int:
    """Return how many inputs a fuzzer tries: HALFMOON_FUZZ, or `usual` where it is unset."""
    return int(os.environ.get("HALFMOON_FUZZ") or usual)


def fuzz_random() -> random.Random:
    """Return a generator with the run's seed, which is printed.

    HALFMOON_FUZZ_SEED is the seed; without it one is drawn. In CI it is the same each time: a
    change is not held up by what luck finds elsewhere.
    """
    drawn = 1 if os.environ.get("CI") else random.SystemRandom().randrange(2**32)
    seed = int(os.environ.get("HALFMOON_FUZZ_SEED") or drawn)
    print(f"HALFMOON_FUZZ_SEED={seed}")
    return random.Random(seed)


def mutate_bytes(dice: random.Random, data: bytes) -> bytes:
    """Change, cut, double or drop a few bytes; most of the data stays."""
    mutant = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at = dice.randrange(len(mutant) + 1)
        n = dice.choice((1, 1, 2, 4, 8, 40))
        match dice.randrange(7):
            case 0 | 1 if mutant:
                mutant[at % len(mutant)] ^= 1 << dice.randrange(8)
            case 2 if mutant:
                mutant[at % len(mutant)] = dice.choice(_EDGES)
            case 3:
                mutant[at:at] = dice.randbytes(n)
            case 4:
                del mutant[at : at + n]
            case 5:
                mutant[at:at] = mutant[at : at + n]
            case _:
                mutant[at : at + n] = bytes([dice.choice(_EDGES)]) * n
    return bytes(mutant)


def cut_anywhere(dice: random.Random, data: bytes) -> bytes:
    """Return a beginning of the data, possibly all of it but one byte, possibly none."""
    return data[: dice.randrange(len(data))] if data else data


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of values below a JSON value: not all of a long list or a deep value."""
    if len(path) > _MAX_DEPTH:
        return []
    found: list[tuple[Any, ...]] = []
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:60]
    elif isinstance(value, list):
        items = list(enumerate(value))[:5]
    for key, part in items:
        found += [(*path, key), *value_paths(part, (*path, key))]
    return found


def mutate_value(dice: random.Random, content: Any, *, deeper: bool = True) -> Any:
    """Return a copy of a JSON value with one of its parts replaced, dropped, doubled or nested."""
    paths = value_paths(content)
    if not paths:
        return dice.choice(ABSURD_VALUES)
    return _replace(dice, content, dice.choice(paths), deeper=deeper)


def _replace(dice: random.Random, value: Any, path: tuple[Any, ...], *, deeper: bool) -> Any:
    if not path:
        return _other(dice, value, deeper=deeper)
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        changed = dict(value)
        if not rest and dice.random() < 0.1:
            del changed[key]
        elif not rest and dice.random() < 0.05:
            changed[f"{key}{dice.choice(('x', '', ' ', '.a'))}"] = changed.pop(key)
        else:
            changed[key] = _replace(dice, value[key], rest, deeper=deeper)
        return changed
    part = _replace(dice, value[key], rest, deeper=deeper)
    return [*value[:key], part, *value[key + 1 :]]


def _other(dice: random.Random, value: Any, *, deeper: bool) -> Any:
    match value:
        case bool():
            choices: list[Any] = [not value]
        case int() | float():
            choices = [value + 1, value - 1, -value, value * 1000, value / 2, str(value), [value]]
        case str():
            choices = [value * 2, value[:-1], value[::-1], value + "\0", [value], {"text": value}]
        case list():
            choices = [value * 2, value[::-1], value[:-1], value * 40, [value], dict.fromkeys("ab")]
        case dict():
            choices = [list(value), [value], {**value, "more": 1}, list(value.values())]
        case _:
            choices = [0, "", []]
    if deeper and dice.random() < 0.03:
        for _ in range(dice.choice((3, 100, 199, 201, 250))):
            value = [value] if dice.random() < 0.9 else {"a": value}
        return value
    return dice.choice(choices) if dice.random() < 0.4 else dice.choice(ABSURD_VALUES)
