"""How much memory a pool gets: what its model wants, as far as there is room."""

import pytest

from halfmoon_models.machine_memory import MachineMemory
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
