"""Numbers that no peer means are refused where frames are read, before anything follows them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from halfmoon_protocol import codec
from halfmoon_protocol.blocks import HASH_BYTES
from halfmoon_protocol.bounds import MAX_KV_TRANSFER_PARAMS, MAX_NAME, MAX_STAGES
from halfmoon_protocol.errors import MalformedMessage
from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.messages import Message, VerifyBlocks

Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number and text in a message, and where it is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    elif isinstance(value, int | float | str):
        yield path, value


def replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, path[1:], new) if k == path[0] else v for k, v in value.items()}
    return [replaced(v, path[1:], new) if i == path[0] else v for i, v in enumerate(value)]


def numbers(wanted: Callable[[Any], bool]) -> list[Any]:
    cases = []
    for message in EXAMPLES:
        fields = msgspec.msgpack.decode(codec.encode(message)[1:])
        for path, value in leaves(fields):
            if wanted(value) and "top" not in path and "score" not in str(path):
                name = f"{fields['type']}.{'.'.join(map(str, path))}"
                cases.append(pytest.param(message, path, id=name))
    return cases


def frame_with(message: Message, path: Path, value: Any) -> bytes:
    fields = msgspec.msgpack.decode(codec.encode(message)[1:])
    return bytes([codec.VERSION]) + msgspec.msgpack.encode(replaced(fields, path, value))


@pytest.mark.parametrize(("message", "path"), numbers(lambda value: isinstance(value, float)))
@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, 1e308])
def test_no_number_of_seconds_is_infinite(message: Message, path: Path, absurd: float) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode(frame_with(message, path, absurd))


@pytest.mark.parametrize(
    ("message", "path"),
    numbers(lambda value: isinstance(value, int) and not isinstance(value, bool)),
)
def test_no_count_and_no_token_is_far_below_nothing(message: Message, path: Path) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode(frame_with(message, path, -(2**60)))


@pytest.mark.parametrize(
    ("message", "path"),
    [
        case
        for case in numbers(lambda value: isinstance(value, str))
        if case.values[1][-1] not in ("reason", "tracestate")
    ],
)
def test_no_name_and_no_address_is_endless(message: Message, path: Path) -> None:
    # The one that names every block of a prompt is longer.
    limit = MAX_KV_TRANSFER_PARAMS if path[-1] == "kv_transfer_params" else 100_000
    with pytest.raises(MalformedMessage):
        codec.decode(frame_with(message, path, "x" * (limit + 1)))


def test_a_record_of_a_thousand_million_stages_is_not_read() -> None:
    welcome = next(m for m in EXAMPLES if codec.encode(m)[1:].find(b"n_stages") > 0)
    with pytest.raises(MalformedMessage, match="n_stages"):
        codec.decode(frame_with(welcome, ("worker", "stage", "n_stages"), 10**9))
    codec.decode(frame_with(welcome, ("worker", "stage", "n_stages"), MAX_STAGES))
    codec.decode(frame_with(welcome, ("worker", "host"), "h" * MAX_NAME))


def test_a_block_hash_of_another_length_is_none() -> None:
    asked = next(message for message in EXAMPLES if isinstance(message, VerifyBlocks))
    codec.decode(frame_with(asked, ("hashes", 0), bytes(HASH_BYTES)))
    for n_bytes in (0, 15, 17, 1 << 20):
        with pytest.raises(MalformedMessage, match="hashes"):
            codec.decode(frame_with(asked, ("hashes", 0), bytes(n_bytes)))
