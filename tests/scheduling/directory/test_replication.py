"""Blocks here have 100 bytes and a token each; a prefix used four times is hot."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.messages import (
    BlocksReplicated,
    DropBlocks,
    KvstoreRefused,
    ReplicateBlocks,
)
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.directory import replication
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.directory.replication import (
    MAX_PREFIXES,
    CopyPrefix,
    DropCopies,
    Replicator,
)
from halfmoon_scheduling.events import KvChanged
from halfmoon_testing.scheduling_inputs import a_request
from tests.scheduling.core import K0, K1, K2, Core, kv_stored

BLOCKS = [BlockHash(bytes([i]) * 16) for i in range(6)]
TOKENS = tuple(range(6))
ROOM = {K0: 10, K1: 10, K2: 20}


class Cache:
    """An index and a replicator; K0 holds the first five blocks."""

    def __init__(self, bytes_per_s: float = 10_000.0) -> None:
        self.index = PrefixIndex()
        self.index.add(K0, BLOCKS[:5])
        self.replicator = Replicator(bytes_per_s, hot_uses=4.0, half_life_s=100.0)

    def use(self, n_blocks: int, times: int = 1, now: float = 0.0) -> None:
        for _ in range(times):
            self.replicator.on_used(BLOCKS[:n_blocks], TOKENS, 1, now)

    def plan(
        self, now: float = 0.0, room: dict[WorkerId, int] | None = None
    ) -> list[CopyPrefix | DropCopies]:
        planned = self.replicator.plan(
            self.index, ROOM if room is None else room, block_bytes=100, block_size=1, now=now
        )
        self.replicator.check()
        return planned

    def copied(self, copy: CopyPrefix) -> None:
        self.index.add(copy.target, copy.hashes)
        self.replicator.on_copied(copy.target, copy.ticket, len(copy.hashes))


def copy_of(planned: list[CopyPrefix | DropCopies]) -> CopyPrefix:
    (copy,) = planned
    assert isinstance(copy, CopyPrefix)
    return copy


def test_what_is_used_often_gets_a_second_holder_where_there_is_most_room() -> None:
    cache = Cache()
    cache.use(3, times=3)
    assert cache.plan(1.0) == []
    cache.use(3, times=2, now=1.0)
    copy = copy_of(cache.plan(1.0))
    assert (copy.source, copy.target) == (K0, K2)
    assert copy.hashes == tuple(BLOCKS[:3])
    assert (copy.parent, copy.token_ids) == (None, (0, 1, 2))
    assert cache.plan(1.1) == []  # it is under way, and one at a time to each
    assert cache.replicator.under_way() == [copy]
    cache.copied(copy)
    assert cache.replicator.under_way() == []


def test_a_holder_more_for_every_so_many_uses() -> None:
    cache = Cache()
    cache.use(3, times=9, now=1.0)
    first = copy_of(cache.plan(1.0))
    cache.copied(first)
    second = copy_of(cache.plan(2.0))
    assert {first.target, second.target} == {K1, K2}
    cache.copied(second)
    assert cache.plan(3.0) == []


def test_uses_of_long_ago_count_less() -> None:
    cache = Cache()
    cache.use(3, times=4, now=0.0)
    cache.use(3, now=300.0)  # three half-lives later: 4/8 and 1
    assert cache.plan(300.0) == []


def test_only_what_a_target_lacks_is_copied() -> None:
    cache = Cache()
    cache.index.add(K1, BLOCKS[:2])
    cache.use(5, times=5, now=1.0)
    copy = copy_of(cache.plan(1.0))
    assert copy.target == K1
    assert copy.hashes == tuple(BLOCKS[2:5])
    assert (copy.parent, copy.token_ids) == (BLOCKS[1], (2, 3, 4))


def test_bytes_per_second_are_bounded_and_the_rest_comes_later() -> None:
    cache = Cache(bytes_per_s=200.0)
    cache.use(5, times=5, now=1.0)
    copy = copy_of(cache.plan(1.0))
    assert len(copy.hashes) == 2
    cache.copied(copy)
    assert cache.plan(1.2) == []
    later = copy_of(cache.plan(9.0))
    assert later.target == copy.target
    assert later.hashes == tuple(BLOCKS[2:4])


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([50.0, 250.0, 1000.0]))
def test_no_span_of_time_sees_more_bytes_than_its_share_and_a_second_s_worth(
    seed: int, bytes_per_s: float
) -> None:
    dice = random.Random(seed)
    cache = Cache(bytes_per_s)
    others = [[BlockHash(bytes([9, i, j]) * 5) for j in range(8)] for i in range(12)]
    for blocks in others:
        cache.index.add(K0, blocks)
    now, spent = 0.0, []
    for _ in range(60):
        now += dice.choice([0.0, 0.1, 1.0, 7.0])
        for blocks in dice.choices(others, k=6):
            cache.replicator.on_used(blocks, tuple(range(8)), 1, now)
        for copy in cache.plan(now):
            if isinstance(copy, CopyPrefix):
                spent.append((now, 100 * len(copy.hashes)))
                cache.copied(copy)
    assert spent
    burst = max(bytes_per_s, 100)  # or one block, which may be dearer than a second's worth
    for i, (first_s, _) in enumerate(spent):
        total = 0
        for at_s, n_bytes in spent[i:]:
            total += n_bytes
            assert total <= bytes_per_s * (at_s - first_s) + burst + 1e-6


def test_answers_to_other_questions_are_ignored() -> None:
    cache = Cache()
    cache.use(3, times=5, now=1.0)
    cache.plan(1.0)
    cache.replicator.on_refused(K2, Ticket("another"), until_s=30.0)
    cache.replicator.on_copied(K1, Ticket("copy-1"), 3)
    assert cache.plan(2.0) == []  # still under way


def test_a_kvstore_that_never_answers_is_asked_again() -> None:
    cache = Cache()
    cache.use(3, times=40, now=1.0)
    assert {c.target for c in cache.plan(1.0) if isinstance(c, CopyPrefix)} == {K2}
    assert copy_of(cache.plan(2.0)).target == K1
    again = copy_of(cache.plan(62.0))
    assert again.target == K2


def test_copies_that_have_become_cold_are_dropped_children_first() -> None:
    cache = Cache()
    cache.use(3, times=5, now=0.0)
    cache.copied(copy_of(cache.plan(1.0)))
    assert cache.plan(100.0) == []  # two and a half uses
    assert cache.plan(200.0) == []  # one and a quarter
    assert cache.plan(300.0) == [DropCopies(K2, tuple(reversed(BLOCKS[:3])))]
    assert cache.plan(301.0) == []


def test_the_last_holder_keeps_what_is_cold() -> None:
    cache = Cache()
    cache.use(3, times=5, now=0.0)
    cache.copied(copy_of(cache.plan(1.0)))
    cache.index.drop(K0)
    assert cache.plan(300.0) == []
    lost = Cache()  # what is hot but held by nobody any more is not copied
    lost.use(3, times=5, now=0.0)
    lost.index.drop(K0)
    assert lost.plan(1.0) == []


def test_hot_prefixes_without_end_take_no_memory_without_end() -> None:
    replicator = Replicator(1e6, hot_uses=1.0, half_life_s=100.0)
    for i in range(MAX_PREFIXES + 50):
        replicator.on_used([BlockHash(i.to_bytes(16, "big"))], (1,), 1, 0.0)
    replicator.check()


def test_of_too_many_blocks_the_ones_unused_longest_are_counted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication, "MAX_COUNTED", 3)
    cache = Cache()
    cache.use(1, times=4)
    for i in (3, 4):
        cache.replicator.on_used(BLOCKS[i : i + 1], (i,), 1, 0.0)
    cache.use(1)
    cache.replicator.on_used(BLOCKS[5:6], (5,), 1, 0.0)  # pushes out the fourth, not the first
    cache.replicator.check()
    assert copy_of(cache.plan(1.0)).hashes == (BLOCKS[0],)


# -- through the whole core ----------------------------------------------------------------------


def a_core(**config: float) -> Core:
    hot = {"replication_bytes_per_s": 1e6, "replication_hot_uses": 3.0}
    return Core("prefill-0", "decode-0", **hot, **config)


def use(core: Core, n_tokens: int) -> None:
    """Four requests come and go."""
    for i in range(4):
        core.arrive(f"cmpl-{i}", n_tokens=n_tokens)
        core.cancel(f"cmpl-{i}")


def told(core: Core, now: float) -> list[tuple[WorkerId, Any]]:
    return [(c.worker_id, c.message) for c in core.tick(now) if isinstance(c, Send)]


@pytest.mark.parametrize("replicates", [True, False])
def test_hot_blocks_are_copied_by_kvstores_that_can(replicates: bool) -> None:
    core, request = a_core(replication_half_life_s=200.0), a_request(n_tokens=100)
    for name in ("kvstore-0", "kvstore-1"):
        core.join(name, replicates=replicates)
        core.hold(name, request, 0)
    core.handle(KvChanged(K0, kv_stored(request.block_hashes)))
    use(core, 100)
    messages = told(core, 1.0)
    if not replicates:
        assert messages == []
        return
    ((target, ask),) = messages
    assert (target, type(ask)) == (K1, ReplicateBlocks)
    assert ask.source == core.conductor.cluster.address(K0)
    assert ask.hashes == request.block_hashes
    assert ask.token_ids == request.token_ids[: 16 * 6]
    core.now = 1.5
    core.hear(K1, KvstoreRefused(ticket=ask.ticket, reason="full"))
    assert told(core, 5.0) == []
    ((_, ask),) = told(core, 12.0)
    core.hear(K1, KvstoreRefused(ticket=ask.ticket, reason="full", retry_after_s=20.0))
    assert told(core, 31.0) == []
    ((_, again),) = told(core, 32.0)
    core.now = 33.0
    core.handle(KvChanged(K1, kv_stored(request.block_hashes)))
    core.hear(K1, BlocksReplicated(ticket=again.ticket, n_blocks=6))
    assert told(core, 34.0) == []
    assert told(core, 900.0) == [(K1, DropBlocks(hashes=request.block_hashes[::-1]))]


def test_a_copy_goes_where_the_most_room_is_left() -> None:
    core, hot, other = a_core(), a_request(n_tokens=64), a_request(n_tokens=480, prompt=1)
    # 34 and 40 blocks are free.
    for name, request, n_held, n_blocks in (
        (K0, hot, 4, 64),
        (K1, other, 30, 64),
        (K2, hot, 0, 40),
    ):
        core.join(name, replicates=True, n_blocks=n_blocks)
        core.hold(name, request, n_held)
    use(core, 64)
    ((target, message),) = told(core, 1.0)
    assert (target, type(message)) == (K2, ReplicateBlocks)
