"""The cost models are recovered from timed forwards; the clock is the test's."""

import pytest

from halfmoon_engine.fake import FakeEngine, FakeModel


def test_a_linear_engine_is_fitted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    engine = FakeEngine(FakeModel(step_s=0.01, token_s=0.0001, max_context=2048))
    engine.attach(memoryview(bytearray(300 * engine.layout.block_bytes)))
    prefill, decode = engine.measure()
    assert (prefill.c0_s, prefill.c1_s) == pytest.approx((0.01, 0.0001), rel=1e-3)
    assert prefill.c2_s == pytest.approx(0, abs=1e-10)
    assert decode.d0_s == pytest.approx(0.01, rel=1e-3)
    assert decode.d1_s == pytest.approx(0.0001, rel=1e-3)
    assert decode.d2_s == pytest.approx(0, abs=1e-10)


def test_a_pool_of_one_page_is_enough() -> None:
    engine = FakeEngine()
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    prefill, decode = engine.measure()
    assert prefill.c0_s + prefill.c1_s + prefill.c2_s > 0
    assert decode.d0_s + decode.d1_s + decode.d2_s > 0
