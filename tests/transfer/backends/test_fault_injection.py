"""Bad luck on purpose is survived, or reported as what it is."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer import Corrupted, Lost, Piece, TransferError, TransferSettings
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan

PATIENCE_S = 60.0
PATIENT = TransferSettings(copy_slice_bytes=1000, slice_bytes=1000, tries_per_path=30)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    drop=st.floats(0, 0.4),
    corrupt=st.floats(0, 0.4),
    inner=st.sampled_from(["memory", "shm", "tcp"]),
)
def test_drops_and_damage_are_survived_with_the_right_bytes(
    make_world: Any, seed: int, drop: float, corrupt: float, inner: str
) -> None:
    world = make_world(inner)
    faults = FaultInjection(inner, FaultPlan(seed=seed, drop_rate=drop, corrupt_rate=corrupt))
    with (
        world.open("here", backends=(faults,), settings=PATIENT) as here,
        world.open("there") as there,
    ):
        local, remote = here.allocate(50_000), there.allocate(50_000)
        sent = random.Random(seed).randbytes(50_000)
        local.view[:] = sent
        piece = Piece(local.region, 0, remote.region, 0, 50_000)
        here.submit("write", [piece]).result(PATIENCE_S)
        assert bytes(remote.view) == sent
        local.view[:] = bytes(50_000)
        report = here.submit("read", [piece]).result(PATIENCE_S)
        assert bytes(local.view) == sent
        assert report.path == (f"faults({inner})",)
        del local, remote


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


def test_damage_on_every_try_is_corrupted(make_world: Any) -> None:
    for inner in ("memory", "shm"):
        world = make_world(inner)
        here = world.open("here", backends=(FaultInjection(inner, FaultPlan(corrupt_rate=1.0)),))
        local, remote = here.allocate(100), world.open("there").allocate(100)
        with pytest.raises(Corrupted, match="checksum"):
            here.submit("write", [Piece(local.region, 0, remote.region, 0, 100)]).result(PATIENCE_S)


def test_a_delay_only_costs_time(make_world: Any) -> None:
    world = make_world("memory")
    here = world.open("here", backends=(FaultInjection("memory", FaultPlan(delay_s=0.05)),))
    local, remote = here.allocate(100), world.open("there").allocate(100)
    report = here.submit("write", [Piece(local.region, 0, remote.region, 0, 100)]).result(
        PATIENCE_S
    )
    assert report.seconds >= 0.05


def test_faults_around_an_unknown_backend_are_refused(make_world: Any) -> None:
    with pytest.raises(ValueError, match=r"no backend 'pigeon'; there are .*memory, .*shm, tcp"):
        make_world("memory").open("here", backends=(FaultInjection("pigeon", FaultPlan()),))


def test_a_thousand_transfers_through_bad_luck_are_right_or_say_why(make_world: Any) -> None:
    """Two paths, both bad: every transfer is done, with its bytes, or says why not."""
    world = make_world("memory,tcp")
    unlucky = [
        FaultInjection("memory", FaultPlan(seed=4, drop_rate=0.3, corrupt_rate=0.2)),
        FaultInjection("tcp", FaultPlan(seed=5, drop_rate=0.1, corrupt_rate=0.1)),
    ]
    here = world.open("here", backends=tuple(unlucky), settings=TransferSettings())
    there = world.open("there")
    n_transfers, size = 1000, 64
    local, remote = here.allocate(n_transfers * size), there.allocate(n_transfers * size)
    local.view[:] = random.Random(6).randbytes(n_transfers * size)
    transfers = [
        here.submit("write", [Piece(local.region, i * size, remote.region, i * size, size)])
        for i in range(n_transfers)
    ]
    n_done = 0
    for i, transfer in enumerate(transfers):
        try:
            transfer.result(PATIENCE_S)
        except TransferError:
            continue
        n_done += 1
        at = slice(i * size, (i + 1) * size)
        assert remote.view[at] == local.view[at]
    stats = here.stats()
    assert (stats.n_transfers, stats.n_failures) == (n_done, n_transfers - n_done)
    assert n_done > n_transfers * 0.9
