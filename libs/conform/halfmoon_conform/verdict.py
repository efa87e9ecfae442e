"""Define how a check ends, and the failure that ends it.

CheckFailed    the subject broke its sentence of the protocol
CheckSkipped   the sentence does not concern this subject
"""

from dataclasses import dataclass
from typing import Literal

#: `known` is a failure that the file of known failures lists; `unexpected_pass` is the opposite.
Status = Literal["passed", "failed", "skipped", "known", "unexpected_pass"]


class CheckFailed(Exception):
    """The subject did something else than its sentence of the protocol says."""


class CheckSkipped(Exception):
    """The check does not concern this subject; the text says why."""


@dataclass(frozen=True)
class Verdict:
    """The end of one check."""

    check_id: str
    status: Status
    #: Why it failed or was skipped.
    reason: str = ""
    seconds: float = 0.0


def require(condition: object, reason: str) -> None:
    """End the check as failed unless the condition holds.

    Raises:
        CheckFailed: it does not.
    """
    if not condition:
        raise CheckFailed(reason)
