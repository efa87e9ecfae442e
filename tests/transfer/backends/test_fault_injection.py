"""Bad luck on purpose is survived, or reported as what it is."""

import random
from typing import Any

import pytest

from halfmoon_transfer import Lost, Piece, TransferSettings
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan

PATIENCE_S = 60.0
PATIENT = TransferSettings(copy_slice_bytes=1000, slice_bytes=1000, tries_per_path=30)


def test_the_same_seed_meets_the_same_faults(make_world: Any) -> None:
    def retries(seed: int) -> list[int]:
        world = make_world("memory")
        faults = FaultInjection("memory", FaultPlan(seed=seed, drop_rate=0.3, corrupt_rate=0.2))
        here = world.open("here", backends=(faults,), settings=PATIENT)
        local, remote = here.allocate(40_000), world.open("there").allocate(40_000)
        pieces = [Piece(local.region, 0, remote.region, 0, 40_000)]
        return [here.submit("write", pieces).result(PATIENCE_S).retries for _ in range(5)]

    first = retries(1)
    assert first == retries(1)
    assert first != retries(2)


def test_a_partition_is_lost_and_ends_when_it_is_healed(make_world: Any) -> None:
    world = make_world("memory")
    faults = FaultInjection("memory", FaultPlan())
    here, there = world.open("here", backends=(faults,)), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    pieces = [Piece(local.region, 0, remote.region, 0, 100)]
    here.submit("write", pieces).result(PATIENCE_S)
    faults.partition()
    with pytest.raises(Lost, match=r"faults\(memory\) failed 3 times, last: partitioned"):
        here.submit("write", pieces).result(PATIENCE_S)
    assert here.view(remote.region, 0, 10) is None
    faults.heal()
    here.submit("write", pieces).result(PATIENCE_S)


def test_a_path_that_dies_in_the_middle_is_replaced_by_the_next(make_world: Any) -> None:
    world = make_world("memory,tcp")
    faults = FaultInjection("memory", FaultPlan(fail_after_n=20))
    here = world.open("here", backends=(faults, "tcp"), settings=PATIENT)
    there = world.open("there")
    local, remote = here.allocate(100_000), there.allocate(100_000)
    local.view[:] = random.Random(3).randbytes(100_000)
    report = here.submit("write", [Piece(local.region, 0, remote.region, 0, 100_000)]).result(
        PATIENCE_S
    )
    assert report.path == ("faults(memory)", "tcp")
    assert remote.view == local.view


def test_faults_around_an_unknown_backend_are_refused(make_world: Any) -> None:
    with pytest.raises(ValueError, match=r"no backend 'pigeon'; there are .*memory, .*shm, tcp"):
        make_world("memory").open("here", backends=(FaultInjection("pigeon", FaultPlan()),))
