"""Cores are counted by affinity, hardware threads and quota."""

from pathlib import Path

import pytest

from halfmoon_models.machine_cores import machine_cores, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Four cores of two hardware threads."""
    lists = {f"cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)}
    return write(tmp_path / "cpus", lists)


def test_hardware_threads_of_a_core_count_once(cpus: Path, tmp_path: Path) -> None:
    assert usable_cores(range(8), cpus, tmp_path) == 4
    assert usable_cores({0, 4}, cpus, tmp_path) == 1
    assert usable_cores({0, 5}, cpus, tmp_path) == 2
    assert usable_cores(range(8), tmp_path / "none", tmp_path) == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 4),
        ({"cpu.max": "garbage"}, 4),
        ({"cpu.max": "1 0"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({}, 4),
    ],
)
def test_a_quota_bounds_it(files: dict[str, str], cores: int, cpus: Path, tmp_path: Path) -> None:
    assert usable_cores(range(8), cpus, write(tmp_path / "cgroup", files)) == cores


def test_this_machine_has_a_core() -> None:
    assert machine_cores() >= 1
