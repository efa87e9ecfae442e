import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.cost_model import unscaled_prefill_s
from halfmoon_scheduling.pipeline import Group, choose_group, chunk_seconds, pipeline_s
from halfmoon_scheduling.placement import Estimate

EVEN = PrefillCost(c0_s=0.5, c1_s=0.01, c2_s=0.0)
GROWING = PrefillCost(c0_s=0.5, c1_s=1e-4, c2_s=1e-8)
P0, P1, P2 = (WorkerId(f"prefill-{i}") for i in range(3))


def single(ttft_s: float) -> Estimate:
    return Estimate(P0, None, 0, None, 0, 0, 0.0, 0.0, ttft_s, ttft_s)


def test_equal_chunks_take_stages_less_one_and_chunks_times_a_share() -> None:
    # 8 chunks of 100 tokens, a second each, a quarter of it at each of 4 stages.
    seconds = pipeline_s(EVEN, 800, 0, n_stages=4, chunk_tokens=100)
    assert seconds == pytest.approx(0.5 + (4 - 1 + 8) * 0.25)


def test_each_hop_is_waited_for_once_by_the_last_chunk() -> None:
    without = pipeline_s(EVEN, 800, 0, n_stages=4, chunk_tokens=100)
    assert pipeline_s(EVEN, 800, 0, n_stages=4, chunk_tokens=100, hop_s=0.1) == pytest.approx(
        without + 3 * 0.1
    )


def test_a_prompt_of_one_chunk_gains_nothing_from_stages() -> None:
    one = pipeline_s(EVEN, 100, 0, n_stages=1, chunk_tokens=100)
    assert pipeline_s(EVEN, 100, 0, n_stages=4, chunk_tokens=100) == pytest.approx(one)


def test_later_chunks_take_longer_and_together_they_are_the_whole() -> None:
    chunks = chunk_seconds(GROWING, 10_000, 2_000, 1_024)
    assert chunks[:-1] == sorted(chunks[:-1])
    assert chunks[1] > chunks[0]
    assert sum(chunks) + GROWING.c0_s == pytest.approx(unscaled_prefill_s(GROWING, 10_000, 2_000))


@given(
    n_tokens=st.integers(1, 50_000),
    cached=st.floats(0, 0.99),
    n_stages=st.integers(1, 8),
    chunk_tokens=st.integers(64, 8192),
)
def test_a_pipeline_is_never_faster_than_perfect_sharing_nor_slower_than_one_worker(
    n_tokens: int, cached: float, n_stages: int, chunk_tokens: int
) -> None:
    n_cached = int(n_tokens * cached)
    alone_s = unscaled_prefill_s(GROWING, n_tokens, n_cached)
    seconds = pipeline_s(GROWING, n_tokens, n_cached, n_stages=n_stages, chunk_tokens=chunk_tokens)
    shared_s = GROWING.c0_s + (alone_s - GROWING.c0_s) / n_stages
    assert shared_s * (1 - 1e-9) <= seconds <= alone_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("n_tokens", "n_cached", "stages", "chunk"),
    [
        (10, 10, 2, 5),
        (0, 0, 2, 5),
        (10, 0, 2, 0),
        (10, 0, 0, 5),
    ],
)
def test_what_makes_no_sense_is_refused(
    n_tokens: int, n_cached: int, stages: int, chunk: int
) -> None:
    with pytest.raises(ValueError, match="at least"):
        pipeline_s(EVEN, n_tokens, n_cached, n_stages=stages, chunk_tokens=chunk)


def test_long_prompts_take_the_group_and_short_ones_one_worker() -> None:
    group = Group((P1, P2), GROWING, chunk_tokens=1024)
    queues = {P1: 0.0, P2: 0.0}
    chosen = {}
    for n_tokens in (500, 2_000, 50_000):
        alone = single(unscaled_prefill_s(GROWING, n_tokens, 0))
        chosen[n_tokens] = choose_group(
            alone, [group], queues, n_tokens=n_tokens, n_cached=0, transfer_s=0.0
        )
    assert chosen[500] is None
    assert chosen[2_000] is None
    long = chosen[50_000]
    assert long is not None
    assert long.ttft_s < 0.6 * unscaled_prefill_s(GROWING, 50_000, 0)


def test_a_group_is_as_busy_as_its_busiest_member() -> None:
    groups = [Group((P0, P1), GROWING), Group((P2,), GROWING)]
    best = choose_group(
        single(1e6),
        groups,
        {P0: 0.0, P1: 90.0, P2: 20.0},
        n_tokens=50_000,
        n_cached=0,
        transfer_s=1.0,
    )
    assert best is not None
    assert best.group.members == (P2,)
    assert best.ttft_s == pytest.approx(20.0 + 1.0 + best.prefill_s)


def test_without_groups_there_is_nothing_to_choose() -> None:
    assert choose_group(single(1e6), [], {}, n_tokens=9, n_cached=0, transfer_s=0.0) is None
