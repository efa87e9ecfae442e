"""What a process may take of its machine and control groups: cores, memory, and a pool of it."""

import os
from pathlib import Path

import pytest

from halfmoon_models.machine_cores import usable_cores
from halfmoon_models.machine_memory import (
    MachineMemory,
    machine_memory_bytes,
    process_memory_bytes,
    read_memory,
)
from halfmoon_models.pool_size import (
    LEAST_BYTES,
    USUAL_BYTES,
    WORKING_BYTES,
    PoolRoom,
    room_bytes,
    wanted_bytes,
    worker_budget,
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


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Four cores of two hardware threads."""
    lists = {f"cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)}
    return written(tmp_path / "cpus", lists)


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
    assert usable_cores(range(8), cpus, written(tmp_path / "cgroup", files)) == cores


#: Of Llama 3.2 1B in bfloat16: a page of 64 tokens.
PAGE = 64 * 16 * 2 * 8 * 64 * 2
HERE = MachineMemory(32 * GIB, 24 * GIB)
CONTAINER = MachineMemory(8 * GIB, 6 * GIB, is_limited=True)


def test_a_context_wants_pages_for_several_of_its_longest_requests_and_the_usual_at_least() -> None:
    assert wanted_bytes(PAGE, 64, 131_072, 4) == 4 * 4 * GIB
    assert wanted_bytes(PAGE, 64, 2048, 4) == USUAL_BYTES


def test_a_mirror_on_the_host_halves_the_room() -> None:
    told = {"process_bytes": 3 * GIB, "memory_bytes": 9 * GIB}
    once = room_bytes(PoolRoom(), HERE, **told)
    assert once is not None
    assert room_bytes(PoolRoom(n_host_copies=2), HERE, **told) == once // 2


@pytest.mark.parametrize(
    ("machine", "process_bytes", "memory_bytes", "room"),
    [
        (HERE, 3 * GIB, 9 * GIB, 6 * GIB - WORKING_BYTES),
        (CONTAINER, 2 * GIB, None, int(0.9 * 8 * GIB) - 2 * GIB - WORKING_BYTES),
        (HERE, 2 * GIB, None, 6 * GIB - WORKING_BYTES),
        (HERE, GIB // 2, GIB, GIB // 2 - GIB // 8),
        (CONTAINER, 8 * GIB, GIB, LEAST_BYTES),
    ],
    ids=["what it is told beside its weights", "most of the limit, alone in its container",
         "a quarter of what is free, as it knows no neighbours",
         "not all of little memory for activations", "a small pool beside weights without room"],
)  # fmt: skip
def test_a_worker_takes(
    machine: MachineMemory, process_bytes: int, memory_bytes: int | None, room: int
) -> None:
    told = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    assert room_bytes(PoolRoom(), machine, process_bytes=process_bytes, **told) == room


@pytest.mark.parametrize("device_share", [1.0, 0.5])
def test_a_device_s_share_bounds_its_copy_of_the_pool(device_share: float) -> None:
    on_device = PoolRoom(0, device_free=60 * GIB, device_total=80 * GIB, device_used=10 * GIB)
    room = room_bytes(on_device, HERE, process_bytes=2 * GIB, device_share=device_share)
    mine = int(0.9 * device_share * 80 * GIB) - 10 * GIB
    assert room == min(mine, int(0.9 * 60 * GIB)) - WORKING_BYTES


def test_a_device_s_mirror_takes_no_more_than_the_host_has_too() -> None:
    mirrored = PoolRoom(1, device_free=60 * GIB, device_total=80 * GIB)
    assert room_bytes(mirrored, HERE, process_bytes=0) == 6 * GIB - WORKING_BYTES


@pytest.mark.parametrize("room", [PoolRoom(is_known=False), PoolRoom()])
def test_unknown_memory_is_said_to_be_unknown(room: PoolRoom) -> None:
    assert room_bytes(room, MachineMemory(None, None), process_bytes=0) is None


def test_workers_that_start_together_leave_the_system_its_part() -> None:
    budget = worker_budget(HERE, n_workers=2, n_processes=2, taken_bytes=GIB)
    assert budget is not None
    assert 8 * GIB < budget < 10 * GIB
    assert 2 * budget + GIB + HERE.total // 10 < HERE.available  # type: ignore[operator]


def test_a_machine_that_is_full_leaves_nothing_to_share() -> None:
    assert worker_budget(MachineMemory(GIB, 0), n_workers=2, n_processes=1, taken_bytes=0) == 0
