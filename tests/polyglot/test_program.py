"""The TypeScript program by itself, and docs/tutorials/replace-a-service.md, command by command."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.polyglot.conftest import FOLDER, ROOT, npm
from tests.tutorial_page import PageReader


@pytest.mark.parametrize("script", ["types:check", "lint", "test"])
def test_the_programs_own_checks_pass(program: Path, script: str) -> None:
    assert program.is_dir()
    npm("run", script)


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (FOLDER / "package-lock.json").read_text()


@pytest.mark.e2e
@pytest.mark.timeout(360)
def test_the_commands_of_the_tutorial_show_what_it_says(program: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/replace-a-service.md").read_text()
    assert str(program.relative_to(ROOT)) in text
    try:
        with PageReader(text, tmp_path) as reader:
            assert reader.follow() == text.count("```sh") == 4
    finally:
        if (started := tmp_path / "kvstore-ts.pid").exists():
            with suppress(ProcessLookupError):
                os.kill(int(started.read_text()), signal.SIGKILL)
