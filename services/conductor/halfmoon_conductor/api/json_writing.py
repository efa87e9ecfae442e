"""Write long answers: token ids and log probabilities by the ten thousand.

A thread writes them in small pieces. Other threads, the event loop above all, get the GIL between
two pieces.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

#: Most tokens and scores of an answer that is written on the event loop.
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
            # Elements of long lists have all of their fields set.
            yield to_json(value[start : start + _PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, each in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(each)
        yield b"]"
    else:
        yield to_json(value)
