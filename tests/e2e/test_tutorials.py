"""docs/tutorials: each command is run, and shows what its page says."""

from pathlib import Path

import pytest

from tests.tutorial_page import ROOT, PageReader

pytestmark = pytest.mark.e2e

FOLDER = ROOT / "docs/tutorials"
#: Elsewhere: tests/polyglot/test_tutorial.py, which has what the page builds.
NEEDS_NODE = "replace-a-service"
NAMES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != NEEDS_NODE)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_tutorial_show_what_it_says(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    with PageReader(text, tmp_path) as reader:
        assert reader.follow() == text.count("```sh") > 3
