"""Define the messages between the conductor and the child processes that read its large bodies.

A child process parses, checks, renders and tokenizes a body. It returns token ids, and the body
without the texts that became tokens: little, whatever the client sent.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import Scope

from halfmoon_conductor import errors
from halfmoon_conductor.engine_io.gateway_interface import ModelCard

_SCOPE_KEY = "halfmoon.read"


class PreparationJob(msgspec.Struct, frozen=True):
    """A body to prepare."""

    #: Name of the request model's class.
    model_name: str
    content: bytes
    card: ModelCard


class PreparedBody(msgspec.Struct, frozen=True, tag="prepared"):
    """The parts of a body that a generation needs."""

    #: The body as JSON, without the fields that became tokens.
    fields: bytes
    #: Token ids of each prompt, 4 bytes each in this machine's byte order.
    packed: tuple[bytes, ...]
    echoed_prompts: tuple[str, ...] = ()

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return [unpack_token_ids(each) for each in self.packed]


class PreparedAnswer(msgspec.Struct, frozen=True, tag="answered"):
    """The complete answer to a request that needs no worker."""

    content: bytes


_KINDS = (
    errors.InvalidRequest,
    errors.NotSupported,
    errors.ContextLengthExceeded,
    errors.UnknownModel,
)


class PreparationRefused(msgspec.Struct, frozen=True, tag="refused"):
    """One of the errors in `errors`, in a form that can be sent."""

    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: errors.ApiError) -> "PreparationRefused":
        """Return the message for an error."""
        return cls(type(error).__name__, error.message, error.param)

    def error(self) -> errors.ApiError:
        """Return the error of this message."""
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
    """Pack token ids into 4 bytes each."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Unpack the token ids of one prompt."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


assert array("I").itemsize == 4, sys.platform


class ExpandedBody(NamedTuple):
    """A body's bytes, completed by what they refer to."""

    content: bytes
    #: Whether they referred to anything.
    is_expanded: bool


class ReadBody(msgspec.Struct, frozen=True):
    """The outcome of reading a request's body."""

    #: `time.perf_counter` when the body had been received.
    received_s: float
    #: Result of a child process; None: the body has token ids alone, and the route has all of it.
    prepared: PreparedBody | None = None
    #: What the route's body expander returned; None: it has none.
    expanded: ExpandedBody | None = None

    @property
    def conversation(self) -> PreparedBody:
        """Result of a child process for a body that always needs one."""
        assert self.prepared is not None
        return self.prepared


def keep_read_body(scope: Scope, read: ReadBody) -> None:
    """Keep the outcome in the scope, for the route."""
    scope[_SCOPE_KEY] = read


def take_read_body(scope: Scope) -> ReadBody:
    """Return the outcome and drop it from the scope, which lives as long as the request."""
    read: ReadBody = scope.pop(_SCOPE_KEY)
    return read


def read_body_of(scope: Scope) -> ReadBody:
    """Return how the body of this scope's request was read."""
    read: Any = scope[_SCOPE_KEY]
    assert isinstance(read, ReadBody)
    return read
