"""How much memory a process may take: of the machine, and of the control groups it is in."""

import os
from pathlib import Path

import pytest

from halfmoon_models.machine_memory import (
    MachineMemory,
    machine_memory_bytes,
    process_memory_bytes,
    read_memory,
)

GIB = 1 << 30


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine of 16 GiB, of which 10 are available."""
    sizes = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n"
    return written(root, {"proc/meminfo": sizes, **files})


def test_a_machine_without_limits_has_what_the_kernel_says(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert read_memory(root) == MachineMemory(16 * GIB, 10 * GIB)


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("group", "files", "memory"),
    [
        (
            "0::/",
            {"memory.max": 6 * GIB, "memory.current": 3 * GIB,
             "memory.stat": f"anon 5\ninactive_file {GIB}"},
            (6 * GIB, 4 * GIB),
        ),
        (
            "0::/user.slice/run.service",
            {"memory.max": "max", "user.slice/memory.max": 8 * GIB,
             "user.slice/memory.current": 7 * GIB, "user.slice/run.service/memory.max": "max"},
            (8 * GIB, GIB),
        ),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/",
            {"memory/memory.limit_in_bytes": "9223372036854771712",
             "memory/a/b/memory.limit_in_bytes": 2 * GIB,
             "memory/a/b/memory.usage_in_bytes": GIB},
            (2 * GIB, GIB),
        ),
    ],
    ids=["a container, less what can't be dropped", "a group above", "the first version"],
)  # fmt: skip
def test_limits_of_the_groups_of_a_process_hold(
    tmp_path: Path, group: str, files: dict[str, object], memory: tuple[int, int]
) -> None:
    written = {f"{GROUPS}/{name}": f"{value}\n" for name, value in files.items()}
    root = machine(tmp_path, {"proc/self/cgroup": f"{group}\n", **written})
    assert read_memory(root) == MachineMemory(*memory, is_limited=True)


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "MemTotal:\n", "\0\xff"])
def test_what_can_not_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    root = written(tmp_path, {"proc/meminfo": text})
    assert read_memory(root) == MachineMemory(None, None)
    assert process_memory_bytes(root) == 0


def test_a_group_s_path_does_not_lead_out_of_the_hierarchy(tmp_path: Path) -> None:
    root = machine(
        tmp_path / "root", {"proc/self/cgroup": "0::/../../../../evil\n", "evil/memory.max": "1\n"}
    )
    assert not read_memory(root).is_limited


def test_this_process_holds_some_of_this_machine_s_memory() -> None:
    total = machine_memory_bytes()
    assert total is not None
    assert 1 << 20 < process_memory_bytes() < total


def test_memory_that_others_can_map_is_no_part_of_a_process_s_own() -> None:
    before = process_memory_bytes()
    fd = os.memfd_create("test")
    try:
        os.write(fd, bytes(64 << 20))
        assert process_memory_bytes() - before < 48 << 20
    finally:
        os.close(fd)
