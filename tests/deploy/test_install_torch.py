"""Which build of torch `make up` fetches."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.install_torch import CPU_INDEX, Build, choose_build

ROOT = Path(__file__).parents[2]


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
