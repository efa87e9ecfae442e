"""Writes answers that are long: token ids and log probabilities by the ten thousand.

It is done in a thread, and in small pieces: whatever needs the interpreter's lock meanwhile, the
event loop above all, has it between two of them.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

#: Tokens and scores in an answer that is written on the event loop, at the most.
MAX_INLINE_ANSWER_TOKENS = 1_000
_PIECE = 128


def dump_json(model: BaseModel) -> bytes:
    """Write a model as `BaseModel.model_dump_json` does with `exclude_unset`."""
    return b"".join(_pieces(model))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        before = b"{"
        for name in type(value).model_fields:
            if name in value.model_fields_set:
                yield before + to_json(name) + b":"
                yield from _pieces(getattr(value, name))
                before = b","
        yield b"{}" if before == b"{" else b"}"
    elif isinstance(value, list) and len(value) > _PIECE:
        for start in range(0, len(value), _PIECE):
            yield b"," if start else b"["
            # Of long lists the elements have all of their fields.
            yield to_json(value[start : start + _PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, each in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(each)
        yield b"]"
    else:
        yield to_json(value)
