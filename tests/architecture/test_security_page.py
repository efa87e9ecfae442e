"""Each promise of docs/security.md has a test, and each test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_the_page_names_tests_that_exist() -> None:
    assert len(NAMED) > 20
    missing = [
        f"{file}::{test}"
        for file, test in NAMED
        if not re.search(rf"^\s*(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_each_promise_has_a_test() -> None:
    promises = [
        line
        for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)
        if section.startswith("Promises")
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| against"))
    ]
    assert len(promises) > 15
    assert [line for line in promises if "`tests/" not in line] == []
