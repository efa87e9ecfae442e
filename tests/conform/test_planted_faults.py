"""Each check quotes the protocol, and fails where it should: at a service with a planted fault."""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from halfmoon_conform.catalogue import all_checks, checks_of
from halfmoon_conform.check import ROLES, Check, ServiceRole
from tests.conform.planted_runs import FAULTS, planted_checks, run_planted

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = " ".join((ROOT / "docs" / "protocol.md").read_text().split())
#: Checks whose fault is not planted by this table; each with what makes it fail, or why none does.
WITHOUT_A_FAULT: dict[str, str] = {}
#: All faults take minutes: by default some of each role are planted, in each run other ones.
EVERY = bool(os.environ.get("HALFMOON_CONFORM_FAULTS"))
_STEP = 24


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_a_check_quotes_a_sentence_of_the_protocol(check: Check) -> None:
    assert " ".join(check.says.split()) in PROTOCOL


def test_each_role_has_checks_and_each_id_is_one_check() -> None:
    assert all(checks_of(role) for role in ROLES)
    assert max(Counter(check.id for check in all_checks()).values()) == 1


def test_each_check_has_a_fault_or_says_why_not() -> None:
    ids = {check.id for check in all_checks()}
    assert set(FAULTS) <= ids
    assert ids - set(FAULTS) == set(WITHOUT_A_FAULT)


def fault_table() -> str:
    """Return the table of docs/conformance.md."""
    rows = [f"| `{check}` | {fault['words']} |" for check, fault in sorted(FAULTS.items())]
    return "\n".join(["| check | fault that it notices |", "|---|---|", *rows])


def test_the_document_has_the_table_of_faults() -> None:
    assert fault_table() in (ROOT / "docs" / "conformance.md").read_text()


def sample(checks: list[Check], seed: int) -> list[Check]:
    """Return each 24th check, from a place that the run's number draws; one at the least."""
    return checks[seed % min(_STEP, len(checks)) :: _STEP] if checks else []


@pytest.mark.parametrize("n", [0, 1, 23, 24, 25, 60])
def test_the_samples_of_many_runs_have_each_check_and_none_is_empty(n: int) -> None:
    checks = list(all_checks()[:n])
    samples = [sample(checks, seed) for seed in range(1000, 1000 + _STEP)]
    assert all(samples) or not n
    assert {check.id for each in samples for check in each} == {check.id for check in checks}
    assert sample(checks, 7) == sample(checks, 7)
    assert max(map(len, samples)) <= n // _STEP + 1


@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.random_seeds(1)
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("role", ["kvstore", "decode", "prefill", "conductor"])
def test_a_check_notices_its_fault(role: ServiceRole, keyed: bool, seed: int) -> None:
    checks = planted_checks(role, keyed=keyed)
    chosen = checks if EVERY else sample(checks, seed)
    if not chosen:
        pytest.skip("no fault is planted here")
    found = asyncio.run(run_planted(role, chosen, keyed=keyed))
    missed = [f"{name}: {v.status} {v.reason}" for name, v in found.items() if v.status != "failed"]
    assert not missed, "\n".join(missed)
