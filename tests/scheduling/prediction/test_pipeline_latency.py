from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.prediction.cost_model import unscaled_prefill_s
from halfmoon_scheduling.prediction.pipeline_latency import choose_chunk_tokens, stage_ends_s

EVEN = PrefillCost(c0_s=0.5, c1_s=0.01, c2_s=0.0)
GROWING = PrefillCost(c0_s=0.5, c1_s=1e-4, c2_s=1e-8)


def even(n_stages: int) -> list[float]:
    return [1 / max(1, n_stages)] * n_stages


def summed(
    cost: PrefillCost, n_tokens: int, n_cached: int, stages: int, chunk: int, hop_s: float
) -> list[float]:
    """The same for equal stages: all of them wait for the longest chunk."""
    bounds = [*range(n_cached, n_tokens, chunk), n_tokens]
    chunks_s = [
        cost.c1_s * (stop - start) + cost.c2_s * (stop**2 - start**2)
        for start, stop in pairwise(bounds)
    ]
    first_s = cost.c0_s + sum(chunks_s) / stages
    return [first_s + stage * (max(chunks_s) / stages + hop_s) for stage in range(stages)]


@given(
    n_tokens=st.integers(1, 50_000),
    cached=st.floats(0, 0.99),
    stages=st.integers(1, 8),
    chunk=st.integers(64, 8192),
    hop_s=st.sampled_from([0.0, 0.01, 5.0]),
)
def test_equal_stages_end_one_after_another_by_the_longest_chunk(
    n_tokens: int, cached: float, stages: int, chunk: int, hop_s: float
) -> None:
    n_cached, chunks = int(n_tokens * cached), {"weights": even(stages), "chunk_tokens": chunk}
    ends_s = stage_ends_s(GROWING, n_tokens, n_cached, hop_s=hop_s, **chunks)  # type: ignore[arg-type]
    assert ends_s == pytest.approx(summed(GROWING, n_tokens, n_cached, stages, chunk, hop_s))
    # It is never faster than perfect sharing, nor without hops slower than one worker.
    alone_s = unscaled_prefill_s(GROWING, n_tokens, n_cached)
    shared_s = GROWING.c0_s + (alone_s - GROWING.c0_s) / stages
    assert shared_s * (1 - 1e-9) <= ends_s[-1] - hop_s * (stages - 1) <= alone_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("n_tokens", "n_cached", "stages", "chunk"),
    [(10, 10, 2, 5), (0, 0, 2, 5), (10, 0, 2, 0), (10, 0, 0, 5)],
)
def test_what_makes_no_sense_is_refused(
    n_tokens: int, n_cached: int, stages: int, chunk: int
) -> None:
    with pytest.raises(ValueError, match="at least"):
        stage_ends_s(EVEN, n_tokens, n_cached, weights=even(stages), chunk_tokens=chunk)


def test_a_slower_last_stage_waits_for_the_first_chunk_and_a_slower_first_one_for_the_last() -> (
    None
):
    # 8 chunks: the first one takes 1 s, the last one 15 s, all of them 64 s.
    cost = PrefillCost(0.0, 0.0, 1e-4)
    late_s = stage_ends_s(cost, 800, 0, weights=[0.1, 0.9], chunk_tokens=100)[-1]
    assert late_s == pytest.approx(0.1 * 1 + 0.9 * 64)
    early_s = stage_ends_s(cost, 800, 0, weights=[0.9, 0.1], chunk_tokens=100)[-1]
    assert early_s == pytest.approx(0.9 * 64 + 0.1 * 15)


# -- the chunk that a group takes ----------------------------------------------------------------


def chosen(cost: PrefillCost, n_tokens: int, n_cached: int = 0, most: int = 1024) -> int:
    return choose_chunk_tokens(cost, n_tokens, n_cached, weights=even(2), most=most, step=64)


def test_chunks_are_short_where_a_pass_costs_little_and_long_where_it_costs_much() -> None:
    # 8k tokens take 2.8 s; a pass of 2 ms is worth many of them, one of 100 ms only a few.
    assert chosen(PrefillCost(0.002, 1.3e-4, 2.6e-8), 8192) == 256
    assert chosen(PrefillCost(0.1, 1.3e-4, 2.6e-8), 8192) == 1024


@given(
    c0_s=st.floats(1e-5, 1),
    c2_s=st.floats(0, 1e-6),
    n_tokens=st.integers(1, 100_000),
    cached=st.floats(0, 0.99),
)
def test_the_chosen_chunk_ends_no_later_than_the_largest_one(
    c0_s: float, c2_s: float, n_tokens: int, cached: float
) -> None:
    cost, n_cached = PrefillCost(c0_s, 1e-4, c2_s), int(n_tokens * cached)
    tokens = chosen(cost, n_tokens, n_cached)
    assert tokens in (1024, 512, 256, 128, 64)

    def end_s(chunk_tokens: int) -> float:
        return stage_ends_s(
            cost,
            n_tokens,
            n_cached,
            weights=even(2),
            chunk_tokens=chunk_tokens,
            hop_s=0.002,
            pass_s=max(c0_s / 2, 0.002),
        )[-1]

    assert end_s(tokens) <= end_s(1024) * (1 + 1e-9)


def test_a_chunk_is_of_whole_blocks_no_larger_than_the_slots_and_not_tried_if_too_small() -> None:
    cheap = PrefillCost(0.0, 1e-4, 2e-8)
    assert chosen(cheap, 8192, most=192) == 192
    assert chosen(cheap, 8192, most=50) == 50
    assert chosen(PrefillCost(0.0, 1e-2, 2e-8), 100_000) == 256
