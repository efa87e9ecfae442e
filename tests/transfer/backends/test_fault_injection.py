"""Bad luck on purpose is survived, or reported as what it is."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon_transfer import Corrupted, Lost, Op, Piece, TransferError, TransferSettings
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from tests.transfer.conftest import PATIENCE_S, Ends

PATIENT = TransferSettings(copy_slice_bytes=1000, slice_bytes=1000, tries_per_path=30)


@settings(max_examples=20, deadline=None)
@example(seed=3, drop=0.0, corrupt=0.3, inner="tcp")
@given(
    seed=st.integers(0, 2**32),
    drop=st.floats(0, 0.4),
    corrupt=st.floats(0, 0.4),
    inner=st.sampled_from(["memory", "shm", "tcp"]),
)
def test_drops_and_damage_are_survived_with_the_right_bytes(
    make_world: Any, seed: int, drop: float, corrupt: float, inner: str
) -> None:
    faults = FaultInjection(inner, FaultPlan(seed=seed, drop_rate=drop, corrupt_rate=corrupt))
    ends = Ends(make_world(inner), 50_000, here={"backends": (faults,), "settings": PATIENT})
    with ends.here, ends.there:
        ends.local.view[:] = sent = random.Random(seed).randbytes(50_000)
        n_retries = ends.move().retries
        assert bytes(ends.remote.view) == sent
        ends.local.view[:] = bytes(50_000)
        report = ends.move("read")
        assert bytes(ends.local.view) == sent
        assert report.path == (f"faults({inner})",)
        if drop + corrupt >= 0.3:  # of a hundred slices
            assert n_retries + report.retries > 0
        del ends.local, ends.remote


def test_the_same_seed_meets_the_same_faults(make_world: Any) -> None:
    def retries(seed: int) -> list[int]:
        faults = FaultInjection("memory", FaultPlan(seed=seed, drop_rate=0.3, corrupt_rate=0.2))
        here = {"backends": (faults,), "settings": PATIENT}
        ends = Ends(make_world("memory"), 40_000, here=here)
        return [ends.move().retries for _ in range(5)]

    first = retries(1)
    assert first == retries(1)
    assert first != retries(2)


def test_a_partition_is_lost_and_ends_when_it_is_healed(make_world: Any) -> None:
    faults = FaultInjection("memory", FaultPlan())
    ends = Ends(make_world("memory"), 100, here={"backends": (faults,)})
    ends.move()
    faults.partition()
    with pytest.raises(Lost, match=r"faults\(memory\) failed 3 times, last: partitioned"):
        ends.move()
    assert ends.here.view(ends.remote.region, 0, 10) is None
    faults.heal()
    ends.move()


def test_a_path_that_dies_in_the_middle_is_replaced_by_the_next(make_world: Any) -> None:
    faults = FaultInjection("memory", FaultPlan(fail_after_n=20))
    here = {"backends": (faults, "tcp"), "settings": PATIENT}
    ends = Ends(make_world("memory,tcp"), 100_000, here=here)
    ends.local.view[:] = random.Random(3).randbytes(100_000)
    assert ends.move().path == ("faults(memory)", "tcp")
    assert ends.remote.view == ends.local.view


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("inner", ["memory", "shm", "tcp"])
def test_bytes_damaged_every_time_are_reported_and_not_done(
    make_world: Any, inner: str, op: Op
) -> None:
    faults = FaultInjection(inner, FaultPlan(corrupt_rate=1.0))
    with pytest.raises(Corrupted, match="checksum"):
        Ends(make_world(inner), 100, here={"backends": (faults,)}).move(op)


def test_a_delay_only_costs_time(make_world: Any) -> None:
    faults = FaultInjection("memory", FaultPlan(delay_s=0.05))
    assert Ends(make_world("memory"), 100, here={"backends": (faults,)}).move().seconds >= 0.05


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
    n_transfers, size = 1000, 64
    here = {"backends": tuple(unlucky), "settings": TransferSettings()}
    ends = Ends(world, n_transfers * size, here=here)
    ends.local.view[:] = random.Random(6).randbytes(n_transfers * size)
    local, remote = ends.local.region, ends.remote.region
    transfers = [
        ends.here.submit("write", [Piece(local, at, remote, at, size)])
        for at in range(0, n_transfers * size, size)
    ]
    n_done = 0
    for i, transfer in enumerate(transfers):
        try:
            transfer.result(PATIENCE_S)
        except TransferError:
            continue
        n_done += 1
        at = slice(i * size, (i + 1) * size)
        assert ends.remote.view[at] == ends.local.view[at]
    stats = ends.here.stats()
    assert (stats.n_transfers, stats.n_failures) == (n_done, n_transfers - n_done)
    assert n_done > n_transfers * 0.9
