"""`make test-nightly` runs what a day leaves out; `make test-fast` leaves out what takes long."""

import os
import subprocess
import sys
from pathlib import Path

from tests.durations import read_durations

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = """
import pytest
from tests.nightly import by_day

def test_of_each_day():
    print("tried", by_day(2, at_night=9))

@pytest.mark.nightly("all numbers are even")
def test_of_the_night():
    pass
"""

QUICK = """
import pytest

def test_of_a_moment():
    pass

@pytest.mark.e2e
def test_of_a_cluster():
    pass
"""


def run(folder: Path, *arguments: str, program: str = PROGRAM, night: str = "") -> str:
    (folder / "test_it.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-s", *arguments, str(folder)]
    environment = {**os.environ, "HALFMOON_NIGHTLY": night}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_day_leaves_out_what_a_night_tries_and_says_that_it_proved(tmp_path: Path) -> None:
    plugin = "-ptests.nightly"
    day, night = run(tmp_path, plugin), run(tmp_path, plugin, night="1")
    assert "1 passed, 1 deselected" in day and "tried 2" in day
    assert "all numbers are even" not in day
    assert "2 passed" in night and "tried 9" in night
    assert "- all numbers are even" in night


def test_a_quick_run_leaves_out_live_clusters_and_the_files_that_took_long(tmp_path: Path) -> None:
    names = [name for name in read_durations() if Path(name).parent == HERE.relative_to(ROOT)]
    asked = ("--quick", "--collect-only", str(HERE))
    plugins = ("-ptests.durations", "-oaddopts=", "-omarkers=e2e nightly")
    told = run(tmp_path, *plugins, *asked, program=QUICK)
    assert "test_of_a_moment" in told and "test_of_a_cluster" not in told
    assert names and "test_locks.py" in told and not any(name in told for name in names)
