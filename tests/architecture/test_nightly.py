"""`make test-nightly` runs what a day leaves out, with larger numbers, and says what it proved."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import pytest
from tests.nightly import by_day

def test_of_each_day():
    print("tried", by_day(2, at_night=9))

@pytest.mark.nightly("all numbers are even")
def test_of_the_night():
    pass
"""


def run(folder: Path, night: str) -> str:
    (folder / "test_it.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.nightly", str(folder)]
    environment = {**os.environ, "HALFMOON_NIGHTLY": night}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_day_leaves_out_what_a_night_tries_and_says_that_it_proved(tmp_path: Path) -> None:
    day, night = run(tmp_path, ""), run(tmp_path, "1")
    assert "1 passed, 1 deselected" in day and "tried 2" in day
    assert "all numbers are even" not in day
    assert "2 passed" in night and "tried 9" in night
    assert "- all numbers are even" in night
