"""Judge answers: compare the tokens that a client got with the right ones, and name the end.

Pure functions of what was received. A verdict that is a violation ends the run with status 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """How a request ended for its client."""

    DONE = "done"
    CANCELLED = "cancelled"
    ERROR = "error"
    BROKEN = "broken"
    SILENT = "silent"


class Verdict(Enum):
    """Judgement of a request."""

    RIGHT = "right"
    CANCELLED = "cancelled by the client"
    NAMED = "named error"
    BROKEN = "broken by a dead conductor"
    WRONG = "wrong token"
    DOUBLED = "doubled token"
    MISSING = "missing token"
    MISCOUNTED = "wrong usage"
    SILENT = "no end in time"
    DROPPED = "connection lost, its conductor alive"
    UNEXPECTED = "unexpected error"

    @property
    def is_violation(self) -> bool:
        """Whether no fault excuses it."""
        return self not in _EXCUSED


_EXCUSED = (Verdict.RIGHT, Verdict.CANCELLED, Verdict.NAMED, Verdict.BROKEN)
#: Errors that faults may cause, by HTTP status and code; a status of 0 is an event of a stream.
_EXPECTED_STATUSES = (0, 429, 500, 503)
#: Tokens that are compared with other places of the right answer.
_RUN = 3


@dataclass(frozen=True)
class ReceivedAnswer:
    """All that a client received of one request."""

    end: End
    tokens: tuple[int, ...] = ()
    #: `completion_tokens` of its usage; None without one.
    n_counted: int | None = None
    #: HTTP status of an error; 0 if it came within a stream.
    status: int = 0
    #: Code of an error, or its type where it has no code.
    code: str = ""
    message: str = ""


def judge(answer: ReceivedAnswer, right: Sequence[int], *, conductor_was_down: bool) -> Verdict:
    """Judge an answer.

    Args:
        answer: what was received.
        right: all tokens that were asked for.
        conductor_was_down: whether its conductor was down at any moment of the request.
    """
    if (fault := _token_fault(answer.tokens, right)) is not None:
        return fault
    match answer.end:
        case End.DONE if len(answer.tokens) < len(right):
            return Verdict.MISSING
        case End.DONE if answer.n_counted not in (None, len(right)):
            return Verdict.MISCOUNTED
        case End.DONE:
            return Verdict.RIGHT
        case End.CANCELLED:
            return Verdict.CANCELLED
        case End.ERROR:
            return Verdict.NAMED if _is_expected(answer) else Verdict.UNEXPECTED
        case End.BROKEN:
            return Verdict.BROKEN if conductor_was_down else Verdict.DROPPED
        case End.SILENT:
            return Verdict.SILENT


def _token_fault(got: Sequence[int], right: Sequence[int]) -> Verdict | None:
    """Name what is wrong with the tokens so far; None if they begin the right answer."""
    pairs = zip(got, right, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return Verdict.DOUBLED if len(got) > len(right) else None
    rest = list(got[at : at + _RUN])
    # A run of tokens tells where it belongs; a shorter rest only whether its neighbour was meant.
    reach = len(right) if len(rest) == _RUN else 1
    for distance in range(1, reach + 1):
        if at >= distance and rest == list(right[at - distance :][: len(rest)]):
            return Verdict.DOUBLED
        if rest == list(right[at + distance :][: len(rest)]):
            return Verdict.MISSING
    return Verdict.WRONG


def _is_expected(answer: ReceivedAnswer) -> bool:
    named = bool(answer.code and answer.message)
    return named and answer.status in _EXPECTED_STATUSES
