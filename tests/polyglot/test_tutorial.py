"""docs/tutorials/replace-a-service.md: each command is run, and shows what the page says."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tutorial_page import ROOT, PageReader

pytestmark = pytest.mark.e2e


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
