"""`make test-fast` leaves out what imports torch or starts a process, whatever the way."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.one_process import LEFT_OUT

ROOT = Path(__file__).parents[2]
STARTS = {
    "subprocess": "import subprocess; subprocess.run(['true'])",
    "fork": "import os; os.fork() or os._exit(0)",
    "system": "import os; os.system('true')",
    "multiprocessing": (
        "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()"
    ),
}


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-p", "tests.one_process", "-q", "-rs", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_test_of_one_process_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it(): assert 1 + 1 == 2")
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("package", ["torch", "transformers.models"])
def test_a_file_that_imports_a_heavy_package_is_left_out(tmp_path: Path, package: str) -> None:
    done = run(tmp_path, f"import {package}\ndef test_it(): assert False")
    assert "1 skipped" in done.stdout and f"imports {package.partition('.')[0]}" in done.stdout


@pytest.mark.parametrize("way", STARTS)
def test_a_test_that_starts_a_process_is_left_out(tmp_path: Path, way: str) -> None:
    done = run(tmp_path, f"def test_it():\n    {STARTS[way]}\n    assert False")
    assert "1 skipped" in done.stdout and "starts a process" in done.stdout, done.stdout


def test_a_heavy_package_that_got_in_all_the_same_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys\ndef test_it(): sys.modules['torch'] = sys")
    assert done.returncode != 0 and "torch was imported" in done.stdout + done.stderr


def test_each_file_that_is_left_out_exists() -> None:
    assert [path for path in LEFT_OUT if not path.exists()] == []
