"""A program that the template forks is what an interpreter of its own would have been."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon_sandbox import bound_process
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.processes.forked_starts import ForkedProcess, ForkTemplate

TELLS = """
import json, os, sys
from pathlib import Path
own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
told = [sys.argv[1:], os.getcwd(), os.environ.get("WORD"), own[3] == str(os.getpid()), __name__]
print(json.dumps(told))
sys.exit(7)
"""
STANDS = "import signal; print('stands'); signal.pause()"


@pytest.fixture(scope="module")
def template() -> Iterator[ForkTemplate]:
    found = ForkTemplate([])
    yield found
    found.close()


@pytest.fixture(autouse=True)
def forking(template: ForkTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_process, "fork", template.fork)


def start(folder: Path, program: str, *words: str, **variables: str) -> Any:
    """Start a program with its output in a file."""
    (folder / "program.py").write_text(program)
    with (folder / "output").open("ab") as output:
        return start_bound(
            [sys.executable, str(folder / "program.py"), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            cwd=folder,
            start_new_session=True,
        )


@pytest.mark.parametrize("variables", [{}, {"PYTHONHASHSEED": "3"}], ids=["forked", "as ever"])
def test_a_program_gets_its_words_its_folder_its_variables_and_gives_its_status(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    process = start(tmp_path, TELLS, "a", "b", WORD="yes", **variables)
    assert process.wait(60) == 7
    assert isinstance(process, ForkedProcess) == (not variables)
    told = json.loads((tmp_path / "output").read_text())
    assert told == [["a", "b"], str(tmp_path), "yes", True, "__main__"]


def test_a_killed_one_is_gone_and_says_by_which_signal(tmp_path: Path) -> None:
    process = start(tmp_path, STANDS)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)
