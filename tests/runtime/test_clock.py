"""Clocks."""

from halfmoon_runtime.clock import Clock, FakeClock, SystemClock


def test_a_fake_clock_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(10.0)
    assert clock.now() == clock.now() == 10.0
    clock.advance(2.5)
    assert clock.now() == 12.5


def test_the_machines_clock_never_runs_backwards() -> None:
    clock: Clock = SystemClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
