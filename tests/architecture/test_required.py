"""A test that the continuous integration installs everything for is not skipped in silence."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.polyglot.conftest import LEAST_NODE

ROOT = Path(__file__).resolve().parents[2]
#: Of the services in TypeScript; it says with which Node.
IMAGE = ROOT / "examples" / "polyglot" / "Dockerfile"
SKIPS = {
    "in the test": "import pytest\ndef test_it():\n    pytest.skip('no library')\n",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason='no library')\n"
    "def test_it():\n    pass\n",
    "in a fixture": "import pytest\n@pytest.fixture\ndef made():\n    pytest.skip('no library')\n"
    "def test_it(made):\n    pass\n",
    "as a whole": "import pytest\npytest.importorskip('no_such_thing', reason='no library')\n"
    "def test_it():\n    pass\n",
}


def run(folder: Path, required: str) -> "subprocess.CompletedProcess[str]":
    options = ["-q", "-p", "conftest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    path = f"{ROOT / 'tests'}:{ROOT}"
    env = {**os.environ, "PYTHONPATH": path, "HALFMOON_REQUIRE": required}
    command = [sys.executable, "-m", "pytest", *options, "."]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_a_skip_of_a_test_that_must_run_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    files = {f"test_{how.replace(' ', '_')}.py": content for how, content in SKIPS.items()}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "test_others.py").write_text(SKIPS["in the test"])
    failed = run(tmp_path, f"test_none.py {' '.join(files)}")
    assert failed.returncode != 0, failed.stdout
    why = r"it was skipped, and HALFMOON_REQUIRE says that it must run: .*no library"
    assert len(re.findall(rf"^(?:E +)?{why}", failed.stdout, re.MULTILINE)) == len(files)
    found = re.findall(r"^(?:FAILED|ERROR) (\w+\.py)", failed.stdout, re.MULTILINE)
    assert sorted(found) == sorted(files), failed.stdout
    skipped = run(tmp_path, "")
    assert "skipped" in skipped.stdout
    assert "failed" not in skipped.stdout and "error" not in skipped.stdout


def test_the_continuous_integration_requires_tests_that_exist() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    [required] = re.findall(r"^export HALFMOON_REQUIRE=(.*)$", script, re.MULTILINE)
    names = required.strip('"').split()
    assert "tests/transfer/test_mooncake_wheel.py" in names
    assert all((ROOT / name).is_file() for name in names)


def test_the_continuous_integration_requires_the_tests_with_vllm_that_it_runs() -> None:
    """Three runs in turn have all files."""
    script = (ROOT / ".ci" / "run").read_text()
    [choice] = re.findall(r"^ +files=(\$\(.*\))$", script, re.MULTILINE)
    assert 'env "HALFMOON_REQUIRE=$files" make test-vllm VLLM_TESTS="$files"' in script
    chosen: list[str] = []
    for run in range(0, 9, 3):
        shell = ["bash", "-c", f"RUN={run}; echo {choice}"]
        told = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
        chosen += told.stdout.split()
    every = [str(each.relative_to(ROOT)) for each in (ROOT / "tests/vllm").glob("test_*.py")]
    assert sorted(chosen) == sorted(every)


def test_the_continuous_integration_requires_the_services_in_typescript_with_any_node() -> None:
    """A distribution may have a Node that is too old for them: npm has the one of their image."""
    script = (ROOT / ".ci" / "run").read_text()
    required = 'HALFMOON_REQUIRE="$HALFMOON_REQUIRE $(echo tests/polyglot/test_*.py)"'
    assert script.splitlines().count(required) == 1, "without a condition"
    [version] = re.findall(r"^ARG NODE_VERSION=(\d+)\.\d+\.\d+$", IMAGE.read_text(), re.MULTILINE)
    assert int(version) >= LEAST_NODE
    [installed] = re.findall(r"^    version=\$\(sed .* (\S+)\)$", script, re.MULTILINE)
    assert ROOT / installed == IMAGE
