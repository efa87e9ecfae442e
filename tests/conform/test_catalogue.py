"""The kit's list of checks: each names a sentence that docs/protocol.md has."""

from collections import Counter
from pathlib import Path

import pytest

from halfmoon_conform.catalogue import all_checks, checks_of
from halfmoon_conform.check import ROLES, Check

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = " ".join((ROOT / "docs" / "protocol.md").read_text().split())


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_a_check_quotes_a_sentence_of_the_protocol(check: Check) -> None:
    assert " ".join(check.says.split()) in PROTOCOL


def test_each_role_has_checks_and_each_id_is_one_check() -> None:
    assert all(checks_of(role) for role in ROLES)
    assert max(Counter(check.id for check in all_checks()).values()) == 1


def test_a_pattern_chooses_checks_by_id() -> None:
    chosen = checks_of("kvstore", ("kvstore.put.*",))
    assert chosen
    assert all(check.id.startswith("kvstore.put.") for check in chosen)
    assert checks_of("kvstore", ("no.such.*",)) == []
