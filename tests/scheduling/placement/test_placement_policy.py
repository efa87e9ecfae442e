"""Times here are chosen to be worked out by hand: a prefill token takes a second, a block has
ten tokens and 100 bytes, a source sends 100 bytes a second."""

from collections.abc import Mapping

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.placement.estimates import (
    DecodeCandidate,
    Placement,
    PlacementRequest,
    PrefillCandidate,
)
from halfmoon_scheduling.placement.home_kvstore import choose_home
from halfmoon_scheduling.placement.modes import open_placement_mode
from halfmoon_scheduling.placement.placement_mode import ModeSettings
from halfmoon_scheduling.placement.placement_policy import place
from halfmoon_scheduling.prediction.cost_model import CostModel

COST = PrefillCost(c0_s=0.0, c1_s=1.0, c2_s=0.0)
P0, P1, P2 = (WorkerId(f"prefill-{i}") for i in range(3))
D0, D1 = WorkerId("decode-0"), WorkerId("decode-1")
K0, K1, K2 = (WorkerId(f"kvstore-{i}") for i in range(3))
HOMES = {P0: K0, P1: K1, P2: K2}


def decode(worker: WorkerId, n_requests: int = 0, free_pages: int = 100) -> DecodeCandidate:
    # A step takes a second, and one more for each request in it.
    return DecodeCandidate(worker, n_requests, free_pages, 1.0 + (n_requests + 1), 0.0)


def placed(
    mode: str,
    queues: Mapping[WorkerId, float],
    prefixes: Mapping[WorkerId, int],
    *,
    n_tokens: int = 105,
    threshold: float = 1.5,
    active: Mapping[WorkerId, int] | None = None,
    decodes: tuple[DecodeCandidate, ...] = (decode(D0),),
    request_id: str = "cmpl-1",
    seed: int = 0,
    homes: Mapping[WorkerId, WorkerId | None] = HOMES,
) -> Placement:
    return place(
        open_placement_mode(mode, ModeSettings(threshold, seed)),
        PlacementRequest(RequestId(request_id), n_tokens, 11, block_size=10, block_bytes=100),
        [PrefillCandidate(p, COST, homes.get(p), queue_s) for p, queue_s in queues.items()],
        decodes,
        prefixes,
        active or {},
        CostModel(prior_bandwidth=100.0),
        lambda prefill: None,
    )


def table(placement: Placement) -> dict[WorkerId, tuple[float, float, float, float]]:
    """queue, transfer, prefill, and their sum."""
    return {
        row.worker_id: (row.queue_s, row.transfer_s, row.prefill_s, row.ttft_s)
        for row in placement.estimates
    }


def test_algorithm_1_by_a_table_worked_out_by_hand() -> None:
    # 105 tokens. K0 holds 8 blocks (the best), K1 holds 6, K2 none. Threshold 1.5.
    #   P0: its own is the best:  ratio 1     -> local:    queue 60 + (105-80)·1 s      = 85
    #   P1: 8/6 = 1.33 <= 1.5                 -> local:    queue 10 + (105-60)·1 s      = 55
    #   P2: 8/0 infinite                      -> transfer: queue 30 + 8 blocks in 8 s
    #                                                      + (105-80)·1 s               = 63
    placement = placed("kvcache_centric", {P0: 60, P1: 10, P2: 30}, {K0: 8, K1: 6})
    assert table(placement) == {P0: (60, 0, 25, 85), P1: (10, 0, 45, 55), P2: (30, 8, 25, 63)}
    assert placement.prefill == P1
    assert (placement.chosen.source, placement.chosen.n_blocks) == (K1, 6)
    assert placement.chosen.transfer_blocks == 0


def test_above_the_threshold_only_what_the_home_lacks_is_transferred() -> None:
    # 8/5 = 1.6 > 1.5: three blocks are transferred, 300 bytes in 3 s.
    placement = placed("kvcache_centric", {P1: 10}, {K0: 8, K1: 5})
    assert table(placement) == {P1: (10, 3, 25, 38)}
    assert (placement.chosen.source, placement.chosen.n_blocks) == (K0, 8)
    assert (placement.chosen.local_blocks, placement.chosen.transfer_blocks) == (5, 3)


@pytest.mark.parametrize(
    ("own", "best", "threshold", "local"),
    [
        (4, 6, 1.5, True),  # equal: local
        (20, 23, 1.15, True),  # equal, where a product would round below
        (10, 11, 1.1, True),
        (4, 7, 1.5, False),
        (4, 5, 1.0, False),
        (4, 4, 1.0, True),
        (0, 1, 1000.0, False),  # an infinite ratio
    ],
)
def test_at_the_threshold_the_own_prefix_is_used(
    own: int, best: int, threshold: float, local: bool
) -> None:
    placement = placed(
        "kvcache_centric", {P0: 0}, {K0: own, K1: best}, n_tokens=500, threshold=threshold
    )
    assert placement.chosen.n_blocks == (own if local else best)
    assert placement.chosen.source == (K0 if local else K1)


def test_without_a_prefix_all_is_computed_and_with_the_whole_prompt_at_least_a_token() -> None:
    placement = placed("kvcache_centric", {P0: 5, P1: 4}, {})
    assert table(placement) == {P0: (5, 0, 105, 110), P1: (4, 0, 105, 109)}
    assert (placement.chosen.source, placement.chosen.n_blocks) == (None, 0)
    whole = placed("kvcache_centric", {P0: 0}, {K0: 10}, n_tokens=100).chosen
    assert (whole.n_blocks, whole.prefill_s) == (9, 10)


def test_a_busy_source_takes_longer_and_of_equal_ones_the_idlest_sends_then_the_lower_id() -> None:
    assert table(placed("kvcache_centric", {P1: 0}, {K0: 8}, active={K0: 2})) == {
        P1: (0, 24, 25, 49)
    }
    prefixes = {K0: 8, K1: 8}
    assert placed("kvcache_centric", {P2: 0}, prefixes, active={K0: 1}).chosen.source == K1
    assert placed("kvcache_centric", {P2: 0}, prefixes).chosen.source == K0


def test_the_least_time_counts_then_the_shorter_queue_and_then_the_lower_id() -> None:
    assert placed("cache_aware", {P0: 60, P1: 10}, {K0: 8}).prefill == P0  # 85 s and 115 s
    # 20 + 25 = 0 + 45
    assert placed("kvcache_centric", {P0: 20, P1: 0}, {K0: 8, K1: 6}).prefill == P1
    assert placed("kvcache_centric", {P1: 0, P0: 0}, {}).prefill == P0


def test_cache_aware_never_transfers() -> None:
    placement = placed("cache_aware", {P0: 60, P1: 10, P2: 30}, {K0: 8, K1: 4})
    assert table(placement) == {P0: (60, 0, 25, 85), P1: (10, 0, 65, 75), P2: (30, 0, 105, 135)}
    assert placement.prefill == P1


def test_min_ttft_takes_the_faster_of_both_branches() -> None:
    # P1, ratio 8/6 below the threshold: 2 blocks in 2 s save 20 s of computing.
    assert placed("min_ttft", {P1: 0}, {K0: 8, K1: 6}).ttft_s == 27
    # P2, ratio infinite: with 20 transfers at the source 1 block takes 21 s and saves 10.
    slow = placed("min_ttft", {P2: 0}, {K0: 1}, active={K0: 20})
    assert (slow.ttft_s, slow.chosen.source) == (105, None)
    assert placed("kvcache_centric", {P2: 0}, {K0: 1}, active={K0: 20}).ttft_s == 116


def test_random_is_spread_over_all_and_repeats_itself() -> None:
    queues = {P0: 0.0, P1: 100.0, P2: 200.0}
    ids = [f"cmpl-{i}" for i in range(60)]
    first = [placed("random", queues, {}, request_id=rid).prefill for rid in ids]
    assert set(first) == {P0, P1, P2}
    assert first == [placed("random", queues, {}, request_id=rid).prefill for rid in ids]
    assert first != [placed("random", queues, {}, request_id=rid, seed=1).prefill for rid in ids]


def test_a_prefill_worker_without_a_kvstore_has_no_prefix_of_its_own() -> None:
    placement = placed("cache_aware", {P0: 0}, {K0: 8}, homes={})
    assert (placement.chosen.home, placement.chosen.n_blocks) == (None, 0)
    # The shortest queue is taken whatever is cached.
    assert placed("load_balance", {P0: 3, P1: 2, P2: 2}, {K0: 10}).prefill == P1


def decoded(*decodes: DecodeCandidate, **more: int) -> tuple[WorkerId | None, float]:
    placement = placed("random", {P0: 0}, {}, decodes=decodes, **more)  # type: ignore[arg-type]
    return placement.decode, placement.tbt_s


def at(worker: WorkerId, n_requests: int, free_pages: int = 50) -> DecodeCandidate:
    """One whose steps take the same however many requests are in them."""
    return DecodeCandidate(worker, n_requests, free_pages, 1.0, 0.0)


def test_decode_is_where_the_next_token_comes_soonest_and_there_is_room() -> None:
    assert decoded(decode(D0, 3), decode(D1, 2)) == (D1, 4)
    full, busy = decode(D0, 0, free_pages=10), decode(D1, 9, free_pages=11)
    assert decoded(full, busy)[0] == D1
    assert decoded(full) == (None, 0)


def test_equal_decode_workers_are_taken_by_requests_pages_and_then_by_id() -> None:
    assert decoded(at(D0, 2), at(D1, 1))[0] == D1
    assert decoded(at(D0, 1), at(D1, 1, 60))[0] == D1
    assert decoded(decode(D1), decode(D0))[0] == D0


def test_what_the_prompt_adds_to_a_step_counts() -> None:
    many_short = DecodeCandidate(D0, 9, 100, 3.0, 0.01)
    few_long = DecodeCandidate(D1, 1, 100, 2.5, 0.02)
    chosen, tbt_s = decoded(many_short, few_long, n_tokens=40)
    assert chosen == D1 and tbt_s == pytest.approx(2.5 + 0.02 * 40)
    assert decoded(many_short, few_long, n_tokens=60)[0] == D0


def test_home_is_the_preferred_kvstore_else_one_on_the_host_else_any_else_none() -> None:
    kvstores = {K0: "here", K1: "here", K2: "there"}
    assert choose_home(P0, "here", K2, kvstores) == K2
    assert choose_home(P0, "here", WorkerId("kvstore-9"), kvstores) in (K0, K1)
    assert choose_home(P0, "there", None, kvstores) == K2
    assert choose_home(P0, "elsewhere", None, kvstores) in kvstores
    assert choose_home(P0, "here", None, {}) is None


def test_homes_are_spread_and_a_kvstore_that_goes_moves_only_its_own() -> None:
    prefills = [WorkerId(f"prefill-{i}") for i in range(60)]
    before = {
        p: choose_home(p, "here", None, dict.fromkeys((K0, K1, K2), "here")) for p in prefills
    }
    assert {K0, K1, K2} == set(before.values())
    after = {p: choose_home(p, "here", None, dict.fromkeys((K0, K2), "here")) for p in prefills}
    assert all(after[p] == before[p] for p in prefills if before[p] != K1)
