"""`make test-fast` leaves out what imports torch or starts a process, whatever the way."""

import re
import subprocess
import sys
from pathlib import Path

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


def run(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    for name, program in programs.items():
        (folder / f"test_{name}.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-p", "tests.one_process", "-q", "-rs", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_what_imports_a_heavy_package_or_starts_a_process_is_left_out(tmp_path: Path) -> None:
    starts = {
        way: f"def test_it():\n    {start}\n    assert False" for way, start in STARTS.items()
    }
    imports = {
        package.partition(".")[0]: f"import {package}\ndef test_it(): assert False"
        for package in ("torch", "transformers.models")
    }
    done = run(tmp_path, fine="def test_it(): assert 1 + 1 == 2", **starts, **imports)
    assert f"1 passed, {len(starts) + len(imports)} skipped" in done.stdout, done.stdout
    reasons = re.findall(r"^SKIPPED \[(\d+)\] .*: it (.*)$", done.stdout, re.MULTILINE)
    assert {reason: int(n) for n, reason in reasons} == {
        "starts a process": len(starts),
        "imports torch": 1,
        "imports transformers": 1,
    }


def test_a_heavy_package_that_got_in_all_the_same_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, it="import sys\ndef test_it(): sys.modules['torch'] = sys")
    assert done.returncode != 0 and "torch was imported" in done.stdout + done.stderr


def test_each_file_that_is_left_out_exists() -> None:
    assert [path for path in LEFT_OUT if not path.exists()] == []
