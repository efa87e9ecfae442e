"""Leases behind an event loop that stands still."""

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.stalling_clock import StallingClock
from halfmoon_runtime.clock import FakeClock


def test_a_lease_outlives_a_stall_and_then_runs_out_as_it_would_have() -> None:
    real = FakeClock()
    clock = StallingClock(real.now, max_gap_s=1.0)
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
    real = FakeClock()
    store = MemoryStore(StallingClock(real.now, max_gap_s=1.0))
    store.put("k", b"v", ttl_s=0.5)
    real.advance(0.6)
    assert store.get("k") is None
