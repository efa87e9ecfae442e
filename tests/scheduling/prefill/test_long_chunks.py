import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.prediction.cost_model import MAX_SCALE, unscaled_prefill_s
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks

LINEAR = PrefillCost(c0_s=0.0, c1_s=0.001, c2_s=0.0)


def long_chunks(
    cost: PrefillCost = LINEAR, *, max_tokens: int = 10**6, max_s: float = 0.5, step_tokens: int = 1
) -> LongChunks:
    return LongChunks(LongChunkLimits(max_tokens, max_s, step_tokens), cost)


WITH_PASS = PrefillCost(c0_s=0.1, c1_s=0.001)
#: Of costs, limits and what else must fit into half a second: the tokens of a chunk.
CHUNKS: dict[str, tuple[PrefillCost, dict[str, int], float, int]] = {
    "as long as allowed": (LINEAR, {}, 0.0, 500),
    "as long as allowed with its pass": (WITH_PASS, {}, 0.0, 400),
    "none if a pass alone takes too long": (PrefillCost(0.6, 0.001), {}, 0.0, 0),
    "of no more tokens than allowed": (LINEAR, {"max_tokens": 300}, 0.0, 300),
    "so also if they are free": (PrefillCost(0.0, 0.0, 0.0), {"max_tokens": 300}, 0.0, 300),
    "of whole steps": (LINEAR, {"step_tokens": 64}, 0.0, 448),
    "none if a step does not fit": (LINEAR, {"step_tokens": 512}, 0.0, 0),
    "shorter by a step that must fit, too": (WITH_PASS, {}, 0.25, 150),
    "none if that takes all": (WITH_PASS, {}, 0.45, 0),
}


@pytest.mark.parametrize(("cost", "limits", "reserved_s", "n_tokens"), CHUNKS.values(), ids=CHUNKS)
def test_a_chunk_is(
    cost: PrefillCost, limits: dict[str, int], reserved_s: float, n_tokens: int
) -> None:
    chunks = long_chunks(cost, max_s=0.5, **limits)
    chunks.reserved_s = reserved_s
    assert chunks.tokens_from(0) == n_tokens


@given(
    st.floats(0, 0.4),
    st.floats(1e-5, 1e-2),
    st.floats(0, 1e-6),
    st.integers(0, 100_000),
)
def test_a_token_more_would_last_too_long(c0_s: float, c1_s: float, c2_s: float, at: int) -> None:
    cost = PrefillCost(c0_s=c0_s, c1_s=c1_s, c2_s=c2_s)
    n_tokens = long_chunks(cost, max_s=0.5).tokens_from(at)
    assert unscaled_prefill_s(cost, at + n_tokens, at) <= 0.5 + 1e-9
    assert unscaled_prefill_s(cost, at + n_tokens + 1, at) >= 0.5 - 1e-9


def test_chunks_follow_the_seconds_that_passes_took() -> None:
    chunks = long_chunks()
    for _ in range(100):
        chunks.observe([(0, 100), (40, 140)], 0.4)
    assert chunks.scale == pytest.approx(2.0)
    assert chunks.tokens_from(0) == 250


def test_one_odd_pass_does_not_count_for_long_and_one_that_was_not_timed_not_at_all() -> None:
    chunks = long_chunks()
    chunks.observe([(0, 100)], 0.0)
    assert chunks.scale == 1.0
    chunks.observe([(0, 100)], 1000.0)
    assert 1.0 < chunks.scale < MAX_SCALE
    for _ in range(30):
        chunks.observe([(0, 100)], 0.1)
    assert chunks.scale == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 0}, {"max_s": 0.0}, {"step_tokens": 0}, {"max_s": float("nan")}]
)
def test_limits_leave_room_for_a_token(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_s"):
        long_chunks(**limits)  # type: ignore[arg-type]
