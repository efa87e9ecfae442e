"""`make bench-kvpool` prints rows of ours; their figures are not checked here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "label",
    [
        "halfmoon, shared memory",
        pytest.param("disk", marks=pytest.mark.nightly("`make bench-kvpool` has rows of the disk")),
    ],
)
def test_the_benchmark_of_the_pool_has_our_rows(label: str) -> None:
    chosen = ["--only", f"^{label}$", "--sizes", "65536", "--seconds", "0.02", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.blocks", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = "halfmoon, disk tier" if label == "disk" else label
    tables = done.stdout.split("put: GB/s")[1]
    assert tables.count(f"| {row} | ") >= 4, done.stdout
