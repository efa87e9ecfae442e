"""What `make up` is told: settings that there are, and the build of torch that it fetches."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from halfmoon_cli.up.up_command import up
from tools.install_torch import CPU_INDEX, Build, choose_build

ROOT = Path(__file__).parents[2]


def make(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run make with our Makefile in a folder where nothing could be installed."""
    (folder / "tools").mkdir()
    for name in ("Makefile", "tools/make_settings.py"):
        shutil.copy(ROOT / name, folder / name)
    # A make that runs the tests has told its own variables.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *words], cwd=folder, env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("PREFIL=2", "PREFIL is no setting of make up: did you mean PREFILL?"),
        ("decode=2", "decode is no setting of make up: did you mean DECODE?"),
        ("PREFILL=2|MODEL=a b'c|KVSTRE+=3", "KVSTRE is no setting of make up: did you mean"),
        ("HF_HOME=/tmp", "A variable for another program goes first: HF_HOME=… make up"),
    ],
)
def test_what_is_no_setting_ends_make_up(tmp_path: Path, words: str, told: str) -> None:
    ended = make(tmp_path, "up", *words.split("|"))
    assert ended.returncode == 2
    assert told in ended.stderr.splitlines()[0]
    assert not (tmp_path / ".venv").exists()


def test_settings_of_any_value_and_settings_of_services_pass(tmp_path: Path) -> None:
    given = ["MODEL=my -- PREFIL=1 'model'", "PORT:=9000", "TORCH=cpu", "HALFMOON_CHUNK_TOKENS=9"]
    ended = make(tmp_path, "-s", ".up-settings-are-known", *given)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_make_up_has_the_settings_that_halfmoon_up_reads_from_the_environment() -> None:
    hints = get_type_hints(up, include_extras=True)
    options = [each.__metadata__[0] for each in hints.values() if hasattr(each, "__metadata__")]
    read = {str(each.envvar) for each in options if each.envvar}
    (line,) = re.findall(r"^UP_SETTINGS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert {each for each in read if not each.startswith("HALFMOON_")} == set(line.split())


@pytest.mark.parametrize(
    ("build", "has_gpu", "has_own_sources", "reaches", "from_cpu_index"),
    [
        ("auto", False, False, True, True), ("cpu", True, False, True, True),
        ("auto", True, False, True, False), ("default", False, False, True, False),
        ("auto", False, True, True, False), ("auto", False, False, False, False),
    ],
)  # fmt: skip
def test_the_cpu_build_is_fetched_where_no_gpu_is_and_pip_is_not_set_up_otherwise(
    build: Build, has_gpu: bool, has_own_sources: bool, reaches: bool, from_cpu_index: bool
) -> None:
    arguments, line = choose_build(
        build, has_gpu=has_gpu, has_own_sources=has_own_sources, reaches=reaches
    )
    assert arguments == (["--extra-index-url", CPU_INDEX] if from_cpu_index else [])
    assert ("0.2 GB" in line) == from_cpu_index
    assert ("3 GB" in line) == (not from_cpu_index and not has_own_sources)


def test_another_build_is_refused_by_name() -> None:
    script = ROOT / "tools/install_torch.py"
    done = subprocess.run(
        [sys.executable, script, "gpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "TORCH is 'gpu'; it is one of auto, cpu, default" in done.stderr
