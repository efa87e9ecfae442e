"""Locks name all that our packages need, in the versions of constraints.txt, with hashes."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import BUILD, FILES, GROUPS, LOCKS, ROOT, third_party


def entries(path: Path) -> dict[str, tuple[Requirement, list[str]]]:
    """Return each package's pin and hashes."""
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for block in re.split(r"\n(?=\S)", path.read_text().strip()):
        pin, *rest = block.split(" \\\n")
        requirement = Requirement(pin)
        found[canonicalize_name(requirement.name)] = (
            requirement,
            [line.strip().removeprefix("--hash=sha256:") for line in rest],
        )
    return found


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, _, version in pairs}


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_the_versions_of_the_constraints(path: Path) -> None:
    versions = pinned()
    for name, (requirement, hashes) in entries(path).items():
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        assert versions.get(name, pin.version) == pin.version, name
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes), name


@pytest.mark.parametrize("group", GROUPS)
def test_a_lock_names_what_our_packages_require(group: str) -> None:
    locked = entries(LOCKS / f"{group}.txt")
    required = third_party(GROUPS[group]) | (set(BUILD) if group == "cluster" else set())
    for each in map(Requirement, required):
        if each.name != "torch":
            pin = locked[canonicalize_name(each.name)][0]
            (exact,) = pin.specifier
            assert each.specifier.contains(exact.version), each


@pytest.mark.parametrize("group", FILES)
def test_a_lock_names_what_a_requirements_file_lists(group: str) -> None:
    locked = entries(LOCKS / f"{group}.txt")
    lines = [
        line.partition("#")[0].strip() for line in (ROOT / FILES[group]).read_text().split("\n")
    ]
    assert {canonicalize_name(Requirement(line).name) for line in lines if line} <= locked.keys()
