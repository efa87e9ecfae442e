from collections.abc import Set
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    decode_payload,
)
from halfmoon_protocol.messages import BlocksSnapshot, SnapshotBlocks
from halfmoon_protocol.snapshots import snapshot_pages
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from tests.scheduling.models import model_test

K = WorkerId("kvstore-0")


def block(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(16, "big"))


def stored(*names: int | bytes) -> BlockStored:
    hashes = tuple(block(name) if isinstance(name, int) else name for name in names)
    return BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=(), block_size=16)


def batch(sequence: int, *events: KvEvent) -> KvEventBatch:
    return KvEventBatch(sequence, 0.0, events)


def snapshot(sequence: int, *names: int, n_before: int = 0, n_after: int = 0) -> BlocksSnapshot:
    """One page: all of it, unless blocks before or after it are counted."""
    hashes = tuple(block(name) for name in names)
    return BlocksSnapshot(sequence=sequence, hashes=hashes, n_before=n_before, n_after=n_after)


def follower(*held: int, sequence: int = 0) -> tuple[KvEventFollower, PrefixIndex]:
    """One that has had its snapshot."""
    index = PrefixIndex()
    f = KvEventFollower(index, max_buffered=3)
    assert f.on_joined(K, 0)
    assert not f.on_snapshot(K, snapshot(sequence, *held), 0)
    return f, index


def holds(index: PrefixIndex, *names: int) -> bool:
    return all(index.longest_prefix([block(name)]) == {K: 1} for name in names) and len(
        index
    ) == len(names)


@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize("tokens", [{}, {"token_ids": []}, {"token_ids": [7] * 48}])
def test_an_index_is_the_same_with_and_without_tokens_in_the_events(
    tokens: dict[str, list[int]], as_arrays: bool
) -> None:
    fields = {"block_hashes": [block(n) for n in (1, 2, 3)], "parent_block_hash": None, **tokens}
    first: Any = {"type": "BlockStored", **fields, "block_size": 16}
    removed: Any = {"type": "BlockRemoved", "block_hashes": [block(2)]}
    if as_arrays:
        first = ["BlockStored", *list(fields.values())[:2], tokens.get("token_ids", []), 16]
        removed = list(removed.values())
    f, index = follower()
    assert not f.on_events(K, decode_payload(msgspec.msgpack.encode([0, [first]]), 1), 0)
    assert not f.on_events(K, decode_payload(msgspec.msgpack.encode([0, [removed]]), 2), 0)
    assert holds(index, 1, 3)


def test_a_gap_asks_for_a_snapshot_once_and_what_follows_is_kept_for_it() -> None:
    f, index = follower(1)
    assert f.on_events(K, batch(2, stored(2)), 0)
    assert not f.on_events(K, batch(3, stored(3)), 0)
    assert holds(index, 1)
    assert not f.on_snapshot(K, snapshot(2, 1, 2, 9), 0)
    assert holds(index, 1, 2, 9, 3)


def test_a_sequence_that_starts_again_asks_for_a_snapshot() -> None:
    f, index = follower(1)
    f.on_events(K, batch(1, stored(2)), 0)
    assert f.on_events(K, batch(0, stored(3)), 0)
    assert not f.on_snapshot(K, snapshot(0, 3), 0)
    assert holds(index, 3)
    assert not f.on_events(K, batch(1, stored(4)), 0)
    assert holds(index, 3, 4)


#: Numbers of the batches that come behind one that is missing, and of snapshots that do not do.
TOO_EARLY = {
    "begun before a restart": ([5, 0], 5, [1]),
    "followed by more batches than are kept": ([2, *range(3, 8)], 2, []),
    "older than what was kept": ([5], 3, []),
}


@pytest.mark.parametrize(("before", "early", "after"), TOO_EARLY.values(), ids=TOO_EARLY)
def test_another_snapshot_is_asked_for_where_one_was(
    before: list[int], early: int, after: list[int]
) -> None:
    f, index = follower(1)
    first, *more = before
    assert f.on_events(K, batch(first, stored(first)), 0)
    for sequence in more:
        assert not f.on_events(K, batch(sequence, stored(sequence)), 0)
    assert f.on_snapshot(K, snapshot(early, 1), 0)
    for sequence in after:
        assert not f.on_events(K, batch(sequence, stored(sequence)), 0)
    last = [*before, *after][-1]
    assert not f.on_snapshot(K, snapshot(last, 3, 4), 0)
    assert holds(index, 3, 4)


def test_a_snapshot_nobody_asked_for_counts_only_if_it_tells_of_more() -> None:
    f, index = follower(1)
    assert not f.on_snapshot(K, snapshot(0), 0)
    assert holds(index, 1)
    assert not f.on_snapshot(K, snapshot(3, 2), 0)
    assert holds(index, 2)
    assert not f.on_events(K, batch(3, AllBlocksCleared()), 0), "the snapshot has it"
    for _ in range(2):
        assert not f.on_events(K, batch(4, stored(4)), 0)
    assert holds(index, 2, 4)


def test_what_has_proven_wrong_is_forgotten_until_a_snapshot_comes() -> None:
    f, index = follower(1)
    assert f.distrust(K, 0)
    assert holds(index)
    assert not f.distrust(K, 0), "it is asked for already"
    assert not f.on_snapshot(K, snapshot(0, 1, n_after=1), 0)
    assert f.distrust(K, 0), "that page was of before"
    assert not f.on_snapshot(K, snapshot(0, 2, n_before=1), 0)
    assert not f.on_snapshot(K, snapshot(0, 1), 0)
    assert holds(index, 1)


def test_hashes_of_other_systems_and_late_words_of_a_lost_kvstore_are_left_out() -> None:
    f, index = follower()
    event = BlockStored(
        block_hashes=(12345, block(1)), parent_block_hash=None, token_ids=(), block_size=16
    )
    f.on_events(K, batch(1, event), 0)
    assert holds(index, 1)
    f.on_lost(K)
    assert not f.on_events(K, batch(2, stored(2)), 0)
    assert not f.on_snapshot(K, snapshot(2, 2), 0)
    assert holds(index)


def test_a_page_after_a_lost_one_is_ignored_and_the_snapshot_is_asked_for_again() -> None:
    f, index = follower()
    assert f.on_events(K, batch(2, stored(2)), 0)
    assert not f.on_snapshot(K, snapshot(2, 1, n_after=2), 1)
    assert not f.on_snapshot(K, snapshot(2, 9, n_before=2), 1), "the page of block 2 was lost"
    assert holds(index, 1)
    assert f.overdue(5, timeout_s=5) == [], "a page has come"
    assert f.overdue(6, timeout_s=5) == [K]
    assert not f.on_snapshot(K, snapshot(2, 9, n_before=1), 6), "of the snapshot given up"
    assert not f.on_snapshot(K, snapshot(2, 1, 2, 9), 6)
    assert holds(index, 1, 2, 9)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
    ),
    max_size=5,
)


class FollowerAgainstTruth(RuleBasedStateMachine):
    """A kvstore, two wires to the conductor (events and answers), and losses on both."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.follower = KvEventFollower(self.index, max_buffered=4)
        self.now = 0.0
        self.start_again()

    def start_again(self) -> None:
        self.truth: set[BlockHash] = set()
        self.sequence = -1
        #: The truth after each batch; -1: before the first one.
        self.truths: dict[int, frozenset[BlockHash]] = {-1: frozenset()}
        #: The newest state that the conductor has heard of by an event or an answer.
        self.heard = -1
        #: What is published, in order: events, and numbers of the last one before.
        self.events: list[KvEventBatch | int] = []
        self.answers: list[BlocksSnapshot] = []
        self.asked = 0
        self.asks(self.follower.on_joined(K, self.now))

    def asks(self, needed: bool) -> None:
        self.asked += needed

    @rule(changes=CHANGES)
    def a_change_arrives_with_all_before_it(self, changes: list[tuple[str, list[int]]]) -> None:
        self.all_arrives()
        self.change(changes)
        self.an_event_travels(lost=False)

    @rule(changes=CHANGES)
    def change(self, changes: list[tuple[str, list[int]]]) -> None:
        events: list[KvEvent] = []
        for what, names in changes:
            hashes = tuple(block(name) for name in names)
            if what == "store":
                self.truth |= set(hashes)
                events.append(stored(*names))
            elif what == "remove":
                self.truth -= set(hashes)
                events.append(BlockRemoved(block_hashes=hashes))
            else:
                self.truth = set()
                events.append(AllBlocksCleared())
        self.sequence += 1
        self.truths[self.sequence] = frozenset(self.truth)
        self.events.append(batch(self.sequence, *events))

    @precondition(lambda self: self.events)
    @rule(lost=st.booleans())
    def an_event_travels(self, lost: bool) -> None:
        travelling = self.events.pop(0)
        if lost:
            return
        if isinstance(travelling, int):
            self.asks(self.follower.on_sequence(K, travelling, self.now))
        else:
            self.heard = max(self.heard, travelling.sequence)
            self.asks(self.follower.on_events(K, travelling, self.now))

    @rule()
    def the_kvstore_tells_how_far_it_is(self) -> None:
        self.events.append(self.sequence)

    @precondition(lambda self: self.asked)
    @rule(lost=st.booleans(), page=st.integers(0, 3))
    def the_kvstore_answers(self, lost: bool, page: int = 0) -> None:
        self.asked -= 1
        if not lost:
            asked = SnapshotBlocks(page=page)
            self.answers += snapshot_pages(asked, self.sequence, sorted(self.truth))

    @precondition(lambda self: self.answers)
    @rule(lost=st.booleans())
    def an_answer_travels(self, lost: bool) -> None:
        page = self.answers.pop(0)
        if not lost:
            self.heard = max(self.heard, page.sequence)
            self.asks(self.follower.on_snapshot(K, page, self.now))

    @rule()
    def time_passes(self) -> None:
        self.now += 3
        for _ in self.follower.overdue(self.now, timeout_s=5):
            self.asked += 1

    @rule()
    def the_kvstore_is_restarted(self) -> None:
        self.start_again()

    @invariant()
    def checks(self) -> None:
        self.follower.check()
        self.index.check()

    @invariant()
    def an_index_that_is_not_behind_has_what_the_kvstore_had_then(self) -> None:
        if self.follower.behind[K] == 0:
            self.holds_exactly(self.truths[self.heard])

    def all_arrives(self) -> None:
        """Deliver what is under way, and answer what is asked."""
        while self.events:
            self.an_event_travels(lost=False)
        while self.asked:
            self.the_kvstore_answers(lost=False)
        while self.answers:
            self.an_answer_travels(lost=False)

    def holds_exactly(self, blocks: Set[BlockHash]) -> None:
        assert {b for b in blocks if self.index.longest_prefix([b])} == blocks
        assert len(self.index) == len(blocks)

    def teardown(self) -> None:
        """With no more losses the index tells the truth, though nothing changes any more."""
        for _ in range(6):
            self.the_kvstore_tells_how_far_it_is()
            self.all_arrives()
            self.time_passes()
        self.holds_exactly(self.truth)


TestFollowerAgainstTruth = model_test(FollowerAgainstTruth, at_night=180)
