"""What passes between the front and the helper processes that read its large bodies.

A helper parses, checks, renders and tokenises. It gives back token ids, and the body without the
texts that became tokens: little, whatever the client sent.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from halfmoon_conductor import errors
from halfmoon_conductor.engine_io.gateway_interface import ModelCard

_SCOPE_KEY = "halfmoon.read"


class PreparationJob(msgspec.Struct, frozen=True):
    """A body to read."""

    #: Name of its shape's class.
    shape: str
    content: bytes
    card: ModelCard


class PreparedBody(msgspec.Struct, frozen=True, tag="prepared"):
    """What a generation needs of a body."""

    #: The body as JSON, without what became tokens.
    fields: bytes
    #: Token ids of each prompt, 4 bytes each in this machine's order.
    packed: tuple[bytes, ...]
    echoes: tuple[str, ...] = ()

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt."""
        return [unpack_token_ids(each) for each in self.packed]


class PreparedAnswer(msgspec.Struct, frozen=True, tag="answered"):
    """The whole answer to a request that needs no worker."""

    content: bytes


_KINDS = (
    errors.InvalidRequest,
    errors.NotSupported,
    errors.ContextLengthExceeded,
    errors.UnknownModel,
)


class PreparationRefused(msgspec.Struct, frozen=True, tag="refused"):
    """One of the errors of `errors`."""

    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: errors.ApiError) -> "PreparationRefused":
        """The same, to be sent."""
        return cls(type(error).__name__, error.message, error.param)

    def error(self) -> errors.ApiError:
        """The error again."""
        kind = getattr(errors, self.kind, None)
        if kind not in _KINDS:
            return errors.ApiError(self.message, param=self.param)
        return kind(self.message, param=self.param)  # type: ignore[no-any-return]


PreparationOutcome = PreparedBody | PreparedAnswer | PreparationRefused

encode_job = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(PreparationJob).decode
encode_outcome = msgspec.msgpack.Encoder().encode
decode_outcome = msgspec.msgpack.Decoder(PreparationOutcome).decode


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids in 4 bytes each."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Token ids of `packed`."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


assert array("I").itemsize == 4, sys.platform


class ReadBody(msgspec.Struct, frozen=True):
    """How a request's body was read."""

    #: `time.perf_counter` when all of it was here.
    began_s: float
    #: Of a helper; None: the route has the whole body, and it is small.
    prepared: PreparedBody | None = None


def keep_read_body(scope: Scope, read: ReadBody) -> None:
    """Keep this for the route."""
    scope[_SCOPE_KEY] = read


def read_body_of(scope: Scope) -> ReadBody:
    """How the body of this scope's request was read."""
    read: Any = scope[_SCOPE_KEY]
    assert isinstance(read, ReadBody)
    return read
