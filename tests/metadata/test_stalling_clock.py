"""Leases behind an event loop that stands still."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.stalling_clock import StallingClock
from tests.metadata.conftest import Hands


def test_a_lease_outlives_a_stall_and_then_runs_out_as_it_would_have() -> None:
    real = Hands()
    clock = StallingClock(real, max_gap_s=1.0)
    store = MemoryStore(clock)
    store.put("k", b"v", ttl_s=10.0)
    for _ in range(4):
        real.advance(1.0)
        clock.tick()
    real.advance(3600.0)
    assert store.get("k") == b"v", "asked by a thread before the loop goes on"
    clock.tick()
    assert store.get("k") == b"v"
    for _ in range(4):
        real.advance(1.0)
        clock.tick()
    assert store.get("k") == b"v", "4 s, 1 s of the stall, 4 s"
    real.advance(1.0)
    assert store.get("k") is None


def test_a_lease_that_nothing_renews_runs_out_between_two_ticks_too() -> None:
    real = Hands()
    store = MemoryStore(StallingClock(real, max_gap_s=1.0))
    store.put("k", b"v", ttl_s=0.5)
    real.advance(0.6)
    assert store.get("k") is None


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_time_grows_and_never_faster_than_real_time(steps: list[tuple[float, bool]]) -> None:
    real = Hands()
    clock = StallingClock(real)
    began_s, last_s = clock(), clock()
    for step_s, ticks in steps:
        real.advance(step_s)
        if ticks:
            clock.tick()
        assert last_s <= clock() <= last_s + step_s + 1e-6
        last_s = clock()
    assert last_s - began_s <= real.now - 1000.0 + 1e-6
