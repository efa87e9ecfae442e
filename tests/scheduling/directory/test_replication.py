"""Blocks here have 100 bytes and a token each; a prefix used four times is hot."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash, RequestId, Ticket, WorkerId
from halfmoon_protocol.kv_events import BlockStored, KvEventBatch
from halfmoon_protocol.messages import (
    BlocksReplicated,
    BlocksSnapshot,
    DropBlocks,
    KvstoreRefused,
    ReplicateBlocks,
)
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory import replication
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.directory.replication import (
    MAX_PREFIXES,
    CopyPrefix,
    DropCopies,
    Replicator,
)
from halfmoon_scheduling.events import (
    KvChanged,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    Tick,
    WorkerJoined,
)
from halfmoon_testing.scheduling_inputs import a_request, a_worker

K0, K1, K2 = (WorkerId(f"kvstore-{i}") for i in range(3))
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


def test_a_kvstore_that_refuses_is_left_alone_for_as_long_as_it_says() -> None:
    cache = Cache()
    cache.use(3, times=5, now=1.0)
    copy = copy_of(cache.plan(1.0, {K0: 1, K2: 1}))
    cache.replicator.on_refused(K2, copy.ticket, until_s=30.0)
    assert cache.plan(29.0, {K0: 1, K2: 1}) == []
    assert copy_of(cache.plan(30.0, {K0: 1, K2: 1})).target == K2


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


def test_what_is_hot_but_held_by_nobody_any_more_is_not_copied() -> None:
    cache = Cache()
    cache.use(3, times=5, now=0.0)
    cache.index.drop(K0)
    assert cache.plan(1.0) == []


def test_the_last_holder_keeps_what_is_cold() -> None:
    cache = Cache()
    cache.use(3, times=5, now=0.0)
    cache.copied(copy_of(cache.plan(1.0)))
    cache.index.drop(K0)
    assert cache.plan(300.0) == []


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


def join(core: Conductor, name: str, **fields: Any) -> None:
    core.handle(WorkerJoined(a_worker(name, **fields)), 0.0)


def sent(core: Conductor, now: float) -> list[tuple[WorkerId, Any]]:
    return [(c.worker_id, c.message) for c in core.handle(Tick(), now) if isinstance(c, Send)]


@pytest.mark.parametrize("replicates", [True, False])
def test_hot_blocks_are_copied_by_kvstores_that_can(replicates: bool) -> None:
    core = Conductor(
        SchedulingConfig(
            replication_bytes_per_s=1e6, replication_hot_uses=3.0, replication_half_life_s=200.0
        )
    )
    for name in ("prefill-0", "decode-0"):
        join(core, name)
    for name in ("kvstore-0", "kvstore-1"):
        join(core, name, replicates=replicates)
        core.handle(MessageReceived(WorkerId(name), BlocksSnapshot(sequence=-1, hashes=())), 0.0)
    request = a_request(n_tokens=100)
    stored = BlockStored(
        block_hashes=request.block_hashes, parent_block_hash=None, token_ids=(), block_size=16
    )
    core.handle(KvChanged(K0, KvEventBatch(0, 0.0, (stored,))), 0.0)
    for i in range(4):
        core.handle(RequestArrived(a_request(f"cmpl-{i}", n_tokens=100)), 0.0)
        core.handle(RequestCancelled(RequestId(f"cmpl-{i}")), 0.0)
    messages = [m for m in sent(core, 1.0) if isinstance(m[1], ReplicateBlocks)]
    if not replicates:
        assert messages == []
        return
    ((target, ask),) = messages
    assert target == K1
    assert ask.source == core.cluster.address(K0)
    assert ask.hashes == request.block_hashes
    assert ask.token_ids == request.token_ids[: 16 * 6]
    core.handle(MessageReceived(K1, KvstoreRefused(ticket=ask.ticket, reason="full")), 1.5)
    assert sent(core, 5.0) == []
    ((_, ask),) = sent(core, 12.0)
    busy = KvstoreRefused(ticket=ask.ticket, reason="full", retry_after_s=20.0)
    core.handle(MessageReceived(K1, busy), 12.0)
    assert sent(core, 31.0) == []
    ((_, again),) = sent(core, 32.0)
    core.handle(KvChanged(K1, KvEventBatch(0, 0.0, (stored,))), 33.0)
    core.handle(MessageReceived(K1, BlocksReplicated(ticket=again.ticket, n_blocks=6)), 33.0)
    assert sent(core, 34.0) == []
    assert sent(core, 900.0) == [(K1, DropBlocks(hashes=tuple(reversed(request.block_hashes))))]
    core.check()


def test_a_copy_goes_where_the_most_room_is_left() -> None:
    core = Conductor(SchedulingConfig(replication_bytes_per_s=1e6, replication_hot_uses=3.0))
    for name in ("prefill-0", "decode-0"):
        join(core, name)
    hot, other = a_request(n_tokens=64), a_request(n_tokens=480, prompt=1)
    held = {K0: (hot, 64), K1: (other, 64), K2: (None, 40)}  # 34 and 40 blocks are free
    for kvstore, (request, n_blocks) in held.items():
        join(core, kvstore, replicates=True, n_blocks=n_blocks)
        hashes = () if request is None else request.block_hashes
        snapshot = BlocksSnapshot(sequence=-1, hashes=hashes)
        core.handle(MessageReceived(kvstore, snapshot), 0.0)
    for i in range(4):
        core.handle(RequestArrived(a_request(f"cmpl-{i}", n_tokens=64)), 0.0)
        core.handle(RequestCancelled(RequestId(f"cmpl-{i}")), 0.0)
    ((target, message),) = sent(core, 1.0)
    assert (target, type(message)) == (K2, ReplicateBlocks)
