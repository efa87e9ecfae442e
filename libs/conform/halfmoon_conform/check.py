"""Define a check, and the decorator that makes one of a function.

A check has an id, the roles it is for, and a sentence of docs/protocol.md that it holds a subject
to. `needs` says what it does to the subject:

    shared     nothing that others would notice: runs beside other checks
    alone      others would disturb it: runs on a subject where nothing else runs
    fresh      wants a subject that has done nothing before: gets one of its own
    killable   the same, and the kit must be able to kill and start the subject
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from halfmoon_conform.check_context import CheckContext

ServiceRole = Literal["kvstore", "decode", "prefill", "conductor"]
ROLES: tuple[ServiceRole, ...] = ("kvstore", "decode", "prefill", "conductor")
WORKERS: tuple[ServiceRole, ...] = ("kvstore", "decode", "prefill")
Needs = Literal["shared", "alone", "fresh", "killable"]
NEEDS: tuple[Needs, ...] = ("shared", "alone", "fresh", "killable")
CheckBody = Callable[["CheckContext"], Awaitable[None]]


@dataclass(frozen=True)
class Check:
    """One check of one or more roles."""

    id: str
    roles: tuple[ServiceRole, ...]
    #: Verbatim from docs/protocol.md but for white space.
    says: str
    run: CheckBody
    needs: Needs = "shared"
    #: Fields of the subject's record without which the check is skipped.
    claims: tuple[str, ...] = ()
    #: Whether there must be a cluster key (True), must be none (False), or either (None).
    keyed: bool | None = None
    #: Features of requests that the check uses; a record may say that the subject lacks them.
    features: tuple[str, ...] = ()


#: Checks of imported modules, by id.
_CHECKS: dict[str, Check] = {}


def check(
    check_id: str,
    *,
    says: str,
    roles: Iterable[ServiceRole],
    needs: Needs = "shared",
    claims: Iterable[str] = (),
    keyed: bool | None = None,
    features: Iterable[str] = (),
) -> Callable[[CheckBody], CheckBody]:
    """Register a function as the check of this id."""

    def registered(body: CheckBody) -> CheckBody:
        claimed, used = tuple(claims), tuple(features)
        add_check(Check(check_id, tuple(roles), says, body, needs, claimed, keyed, used))
        return body

    return registered


def add_check(added: Check) -> None:
    """Register a check.

    Raises:
        ValueError: there is one with this id.
    """
    if added.id in _CHECKS:
        raise ValueError(f"two checks have the id {added.id}")
    _CHECKS[added.id] = added


def registered_checks() -> list[Check]:
    """Return all checks that were registered, in their order."""
    return list(_CHECKS.values())
