"""The TypeScript program by itself: types of the schema, lint, golden files."""

from pathlib import Path

import pytest

from tests.polyglot.conftest import FOLDER, npm


@pytest.mark.parametrize("script", ["types:check", "lint", "test"])
def test_the_programs_own_checks_pass(program: Path, script: str) -> None:
    assert program.is_dir()
    npm("run", script)


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (FOLDER / "package-lock.json").read_text()
