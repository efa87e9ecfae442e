"""Read `cases/*.yaml` and make a check of each case."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

from halfmoon_conform.check import ROLES, WORKERS, Check, ServiceRole
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.data_cases.case_steps import STEPS, CaseRun
from halfmoon_conform.data_cases.case_values import CaseError

_FIELDS = {"id", "roles", "says", "needs", "claims", "keyed", "features", "steps"}
_NEEDS = ("shared", "alone", "fresh", "killable")


def read_cases() -> Iterator[Check]:
    """Yield the check of each case, file by file.

    Raises:
        CaseError: a case is not written as docs/conformance.md says.
    """
    folder = files("halfmoon_conform") / "cases"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if file.name.endswith(".yaml"):
            for case in yaml.safe_load(file.read_text()):
                yield _as_check(case)


def _as_check(case: dict[str, Any]) -> Check:
    name = case.get("id", "?")
    if unknown := set(case) - _FIELDS:
        raise CaseError(f"case {name}: unknown fields {', '.join(sorted(unknown))}")
    if case.get("needs", "shared") not in _NEEDS:
        raise CaseError(f"case {name}: needs is one of {', '.join(_NEEDS)}")
    for step in case["steps"]:
        if len(step) != 1 or next(iter(step)) not in STEPS:
            raise CaseError(f"case {name}: no such step: {step!r:.80}")
    return Check(
        id=name,
        roles=_roles(name, case["roles"]),
        says=case["says"],
        run=_body(case["steps"]),
        needs=case.get("needs", "shared"),
        claims=tuple(case.get("claims", ())),
        keyed=case.get("keyed"),
        features=tuple(case.get("features", ())),
    )


def _roles(name: str, given: str | list[str]) -> tuple[ServiceRole, ...]:
    if given == "workers":
        return WORKERS
    known = {role: role for role in ROLES}
    if not set(given) <= set(known):
        raise CaseError(f"case {name}: roles are `workers`, or a list of {', '.join(ROLES)}")
    return tuple(known[role] for role in ROLES if role in given)


def _body(steps: list[dict[str, Any]]) -> Any:
    async def body(context: CheckContext) -> None:
        run = CaseRun(context)
        for number, step in enumerate(steps, 1):
            try:
                await run.perform(step)
            except CaseError as error:
                raise CaseError(f"step {number} of {context.check_id}: {error}") from None

    return body
