"""The cost models are recovered from timed forwards; the clock is the test's."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.forward_timing import least_forward_s
from halfmoon_engine.interface import Draw, Run, TokenResult
from halfmoon_protocol.sampling import Sampling


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the kernel's count of waiting for a CPU, which knows no clock of a test."""
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 0 0")
    monkeypatch.setattr("halfmoon_engine.forward_timing._SCHEDSTAT", schedstat)
    return schedstat


def test_a_linear_engine_is_fitted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.0001, max_context=2048))
    engine.attach(memoryview(bytearray(300 * engine.layout.block_bytes)))
    prefill, decode = engine.measure()
    assert (prefill.c0_s, prefill.c1_s) == pytest.approx((0.01, 0.0001), rel=1e-3)
    assert prefill.c2_s == pytest.approx(0, abs=1e-10)
    assert decode.d0_s == pytest.approx(0.01, rel=1e-3)
    assert decode.d1_s == pytest.approx(0.0001, rel=1e-3)
    assert decode.d2_s == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize(("long_s", "n_forwards"), [(10.0, 6), (0.005, 2)])
def test_a_forward_that_takes_long_is_not_repeated(long_s: float, n_forwards: int) -> None:
    engine = Counting(FakeModelSpec(step_s=0.01))
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    run = Run([1], 0, [0], Draw(Sampling(temperature=0.0)))
    assert least_forward_s(engine, [run], repeats=5, long_s=long_s) > 0
    assert engine.n_forwards == n_forwards  # the first one warms up


def test_waiting_for_a_cpu_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, nobody_else: Path
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 4 * seconds  # others have the CPU for three quarters of the time
        nobody_else.write_text(f"0 {round(now * 0.75 * 1e9)} 0")

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.0))
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    run = Run([1], 0, [0], Draw(Sampling(temperature=0.0)))
    assert least_forward_s(engine, [run], repeats=3, long_s=1.0) == pytest.approx(0.01)


def test_waiting_while_the_wait_is_looked_up_leaves_seconds_above_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such seconds made a worker say that its work costs nothing."""
    now = waited = 0.0
    waits = itertools.cycle((0.0, 5.0))  # before and after each forward

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def look_up() -> float:
        nonlocal now, waited
        wait = next(waits)
        now, waited = now + wait, waited + wait
        return waited

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("halfmoon_engine.forward_timing._waited_s", look_up)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.0))
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    run = Run([1], 0, [0], Draw(Sampling(temperature=0.0)))
    assert least_forward_s(engine, [run], repeats=3, long_s=1.0) == pytest.approx(0.01)


def test_a_slow_engine_is_timed_behind_a_long_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    class Quadratic(FakeEngine):
        def forward(self, runs: Sequence[Run], **kwargs: Any) -> list[TokenResult | None]:
            nonlocal now
            for run in runs:
                new, cached = len(run.token_ids), run.start
                now += 0.001 + 4e-3 * new + 4e-7 * ((cached + new) ** 2 - cached**2)
            return super().forward(runs, **kwargs)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    engine = Quadratic(FakeModelSpec(max_context=16384))
    engine.attach(memoryview(bytearray(200 * engine.layout.block_bytes)))
    prefill, _ = engine.measure()
    assert now < 30  # far from all shapes were timed
    assert prefill.c2_s == pytest.approx(4e-7, rel=1e-2)


class Counting(FakeEngine):
    n_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> list[TokenResult | None]:
        self.n_forwards += 1
        return super().forward(*args, **kwargs)


def test_a_pool_of_one_page_is_enough() -> None:
    engine = FakeEngine()
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    prefill, decode = engine.measure()
    assert prefill.c0_s + prefill.c1_s + prefill.c2_s > 0
    assert decode.d0_s + decode.d1_s + decode.d2_s > 0
