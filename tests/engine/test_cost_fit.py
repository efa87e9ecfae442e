"""The cost models are recovered from timed forwards; the clock is the test's."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfmoon_engine import forward_timing
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.forward_timing import least_forward_s
from halfmoon_engine.interface import Draw, Run, TokenResult
from halfmoon_protocol.sampling import Sampling


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the kernel's count of waiting for a CPU, which knows no clock of a test."""
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 0 0")
    monkeypatch.setattr(forward_timing, "_SCHEDSTAT", schedstat)


class Time:
    """What a test's clock says; others may have the CPU for a share of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.of_others = 0
        monkeypatch.setattr("time.sleep", self.sleep)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += (1 + self.of_others) * seconds
        waited = self.now * self.of_others / (1 + self.of_others)
        forward_timing._SCHEDSTAT.write_text(f"0 {round(waited * 1e9)} 0")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def attached(engine: FakeEngine, n_pages: int = 1) -> FakeEngine:
    engine.attach(memoryview(bytearray(n_pages * engine.layout.block_bytes)))
    return engine


STEP = Run([1], 0, [0], Draw(Sampling(temperature=0.0)))


@pytest.mark.usefixtures("time")
def test_a_linear_engine_is_fitted_exactly() -> None:
    model = FakeModelSpec(step_s=0.01, token_s=0.0001, max_context=2048)
    prefill, decode = attached(FakeEngine(model), 300).measure()
    for fitted in ((prefill.c0_s, prefill.c1_s), (decode.d0_s, decode.d1_s)):
        assert fitted == pytest.approx((0.01, 0.0001), rel=1e-3)
    assert (prefill.c2_s, decode.d2_s) == pytest.approx((0, 0), abs=1e-10)


@pytest.mark.parametrize(("long_s", "n_forwards"), [(10.0, 6), (0.005, 2)])
def test_a_forward_that_takes_long_is_not_repeated(long_s: float, n_forwards: int) -> None:
    engine = Counting(FakeModelSpec(step_s=0.01))
    assert least_forward_s(attached(engine), [STEP], repeats=5, long_s=long_s) > 0
    assert engine.n_forwards == n_forwards  # the first one warms up


def test_waiting_for_a_cpu_is_not_counted(time: Time) -> None:
    time.of_others = 3
    engine = attached(FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.0)))
    least_s = least_forward_s(engine, [STEP], repeats=3, long_s=1.0)
    assert least_s == pytest.approx(0.01)


def test_waiting_while_the_wait_is_looked_up_leaves_seconds_above_zero(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such seconds made a worker say that its work costs nothing."""
    waited = 0.0
    waits = itertools.cycle((0.0, 5.0))  # before and after each forward

    def look_up() -> float:
        nonlocal waited
        wait = next(waits)
        time.now, waited = time.now + wait, waited + wait
        return waited

    monkeypatch.setattr(forward_timing, "_waited_s", look_up)
    engine = attached(FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.0)))
    least_s = least_forward_s(engine, [STEP], repeats=3, long_s=1.0)
    assert least_s == pytest.approx(0.01)


def test_a_slow_engine_is_timed_behind_a_long_prefix(time: Time) -> None:
    class Quadratic(FakeEngine):
        def forward(self, runs: Sequence[Run], **kwargs: Any) -> list[TokenResult | None]:
            for run in runs:
                new, cached = len(run.token_ids), run.start
                time.now += 0.001 + 4e-3 * new + 4e-7 * ((cached + new) ** 2 - cached**2)
            return super().forward(runs, **kwargs)

    prefill, _ = attached(Quadratic(FakeModelSpec(max_context=16384)), 200).measure()
    assert time.now < 30  # far from all shapes were timed
    assert prefill.c2_s == pytest.approx(4e-7, rel=1e-2)


class Counting(FakeEngine):
    n_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> list[TokenResult | None]:
        self.n_forwards += 1
        return super().forward(*args, **kwargs)


def test_a_pool_of_one_page_is_enough() -> None:
    prefill, decode = attached(FakeEngine()).measure()
    assert prefill.c0_s + prefill.c1_s + prefill.c2_s > 0
    assert decode.d0_s + decode.d1_s + decode.d2_s > 0
