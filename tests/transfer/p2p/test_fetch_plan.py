"""Which shard from whom next: decided without sockets, so tried with all kinds of sources."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer.p2p.fetch_plan import FetchPlan, ShardOffer
from halfmoon_transfer.p2p.object_record import ShardSource
from halfmoon_transfer.p2p.p2p_settings import P2PSettings, shard_bytes_for
from tests.nightly import by_day

MIB = 1024 * 1024
GOLD = ShardSource("gold", 1)
OTHER = ShardSource("other", 1)
THIRD = ShardSource("third", 1)


def offer(source: ShardSource, shards: Any, *, gold: bool = False) -> ShardOffer:
    return ShardOffer(source, gold, frozenset(shards))


def first(n: int) -> int:
    del n
    return 0


def make_plan(n_shards: int, *offers: ShardOffer, **settings: Any) -> FetchPlan:
    plan = FetchPlan(n_shards, P2PSettings(**settings))
    plan.on_offers(offers)
    return plan


def test_what_a_replica_has_is_taken_before_what_only_gold_has() -> None:
    plan = make_plan(3, offer(GOLD, range(3), gold=True), offer(OTHER, [2]))
    fetches = [plan.next(first) for _ in range(3)]
    assert [(each.shard, each.source) for each in fetches if each] == [
        (2, OTHER),
        (0, GOLD),
        (1, GOLD),
    ]


def test_gold_is_left_alone_while_offers_are_old() -> None:
    plan = make_plan(3, offer(GOLD, range(3), gold=True), offer(OTHER, [2]))
    fetch = plan.next(first, gold_too=False)
    assert fetch is not None and fetch.source == OTHER
    assert plan.next(first, gold_too=False) is None
    assert not plan.is_saturated
    plan.on_offers([offer(GOLD, range(3), gold=True), offer(OTHER, [1, 2])])
    fetch = plan.next(first)
    assert fetch is not None and (fetch.shard, fetch.source) == (1, OTHER)


def test_replicas_are_chosen_by_the_dice() -> None:
    dice = random.Random(0).randrange
    counts: Counter[ShardSource] = Counter()
    for _ in range(200):
        plan = make_plan(1, offer(GOLD, [0], gold=True), offer(OTHER, [0]), offer(THIRD, [0]))
        fetch = plan.next(dice)
        assert fetch is not None
        counts[fetch.source] += 1
    assert set(counts) == {OTHER, THIRD}
    assert min(counts.values()) > 50


def test_getters_that_start_together_ask_for_different_shards() -> None:
    asked = set()
    for seed in range(10):
        fetch = make_plan(64, offer(GOLD, range(64), gold=True)).next(random.Random(seed).randrange)
        assert fetch is not None
        asked.add(fetch.shard)
    assert len(asked) > 5


def test_no_more_is_in_flight_than_is_allowed() -> None:
    plan = make_plan(10, offer(GOLD, range(10), gold=True), parallel=3)
    assert [plan.next(first) is None for _ in range(4)] == [False, False, False, True]
    plan.on_fetched(0)
    assert plan.next(first) is not None


def test_a_source_that_is_gone_is_not_asked_again() -> None:
    plan = make_plan(2, offer(GOLD, range(2), gold=True), offer(OTHER, range(2)))
    fetch = plan.next(first)
    assert fetch is not None and fetch.source == OTHER
    plan.on_failed(fetch.shard, "no region of this key", gone=True)
    assert plan.suspects == {OTHER}
    others = [plan.next(first), plan.next(first)]
    assert [each.source for each in others if each] == [GOLD, GOLD]


def test_a_source_that_fails_again_and_again_is_left_alone() -> None:
    plan = make_plan(20, offer(OTHER, range(20)), strikes=3)
    for _ in range(3):
        fetch = plan.next(first)
        assert fetch is not None
        plan.on_failed(fetch.shard, "silence")
    assert plan.next(first) is None
    assert plan.stuck_reason() == "20 of 20 shards are missing; other: silence"


def test_a_success_forgives_a_source_its_failures() -> None:
    plan = make_plan(20, offer(OTHER, range(20)), strikes=2, tries_per_source=99)
    for _ in range(20):
        fetch = plan.next(first)
        assert fetch is not None
        plan.on_failed(fetch.shard, "silence")
        fetch = plan.next(first)
        assert fetch is not None
        plan.on_fetched(fetch.shard)
    assert plan.done


def test_a_shard_that_its_only_source_keeps_failing_is_given_up() -> None:
    plan = make_plan(1, offer(OTHER, [0]), strikes=99, tries_per_source=3)
    for _ in range(3):
        assert plan.next(first) is not None
        plan.on_failed(0, "wrong checksum")
    assert plan.next(first) is None
    plan.on_offers([offer(OTHER, [0]), offer(THIRD, [0])])
    fetch = plan.next(first)
    assert fetch is not None and fetch.source == THIRD


def test_missing_shards_without_a_source_are_reported() -> None:
    plan = make_plan(5, offer(OTHER, [0, 1, 4]))
    for _ in range(3):
        fetch = plan.next(first)
        assert fetch is not None
        plan.on_fetched(fetch.shard)
    assert plan.next(first) is None
    assert "no source has 2 of them, the first is 2" in plan.stuck_reason()
    assert plan.completed_shards == {0, 1, 4}


@settings(
    max_examples=by_day(25, at_night=600),
    deadline=None,
)
@given(data=st.data())
def test_all_shards_come_as_long_as_somebody_good_has_them(data: st.DataObject) -> None:
    n_shards = data.draw(st.integers(0, 20))
    names = [ShardSource(f"s{i}", 1) for i in range(data.draw(st.integers(1, 4)))]
    good = data.draw(st.sampled_from(names))
    offers = [
        offer(
            each,
            range(n_shards)
            if each == good
            else data.draw(st.sets(st.integers(0, max(0, n_shards - 1)))) & set(range(n_shards)),
            gold=data.draw(st.booleans()),
        )
        for each in names
    ]
    plan = FetchPlan(n_shards, P2PSettings(parallel=data.draw(st.integers(1, 5))))
    dice = random.Random(data.draw(st.integers(0, 99))).randrange
    in_flight = []
    for _ in range(1000):
        plan.check()
        if plan.done:
            break
        plan.on_offers(data.draw(st.permutations(offers)))
        while (fetch := plan.next(dice)) is not None:
            in_flight.append(fetch)
        assert in_flight, plan.stuck_reason()
        back = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
        if back.source == good or data.draw(st.booleans()):
            plan.on_fetched(back.shard)
        else:
            plan.on_failed(back.shard, "bad luck", gone=data.draw(st.booleans()))
    assert plan.done


@pytest.mark.parametrize(
    ("n_bytes", "expected_mib"),
    [(0, 1), (64 * MIB, 1), (1024 * MIB, 8), (1024 * MIB + 1, 9), (10**12, 64)],
)
def test_shards_are_neither_many_nor_large(n_bytes: int, expected_mib: int) -> None:
    assert shard_bytes_for(n_bytes) == expected_mib * MIB
