import math
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import (
    BlockCache,
    CacheFull,
    DuplicateTicket,
    UnknownTicket,
)
from tests.scheduling.cache.chains import chain
from tests.scheduling.models import model_test

ME, YOU = "prefill-0", "prefill-1"
T1, T2, T3 = Ticket("t1"), Ticket("t2"), Ticket("t3")


def put(cache: BlockCache, name: str, now: float = 0.0, owner: str = ME) -> list[BlockHash]:
    """Store all blocks of a prompt; what was evicted for them."""
    reserved = cache.reserve(owner, Ticket(f"put-{name}-{now}"), chain(name), None, now)
    cache.commit(owner, Ticket(f"put-{name}-{now}"), [7] * len(reserved.places), now)
    return reserved.evicted


def test_the_block_unused_longest_goes_first_and_children_before_parents() -> None:
    cache = BlockCache(4)
    put(cache, "ab")
    put(cache, "xy")
    cache.lease(ME, T1, chain("ab"), now=0)
    cache.release(ME, T1)
    assert put(cache, "q") == [b"xy"]
    assert put(cache, "r") == [b"x"]
    assert put(cache, "s") == [b"ab"]


@pytest.mark.parametrize(
    ("names", "evicted"), [("a x ab", ["x", "ab", "a"]), ("a ab x", ["ab", "a", "x"])]
)
def test_under_fifo_a_parent_goes_right_after_the_child_that_it_has_to_wait_for(
    names: str, evicted: list[str]
) -> None:
    cache = BlockCache(3, policy="fifo")
    for name in names.split():
        put(cache, name)
    assert [gone.decode() for name in "qrs" for gone in put(cache, name)] == evicted


def test_a_block_stands_as_deep_in_its_prompt_as_its_parent_says() -> None:
    cache = BlockCache(7, policy="length_aware")
    for name in ("ab", "xyz"):
        put(cache, name)
    more = [BlockHash(b"abc"), BlockHash(b"abcd")]
    cache.reserve(ME, T1, more, BlockHash(b"ab"), now=0)
    cache.commit(ME, T1, [7, 7], now=0)
    # The fourth of its prompt, then of two third ones the one unused longest.
    assert put(cache, "q") == [b"abcd"]
    assert put(cache, "r") == [b"xyz"]


def test_a_ticket_whose_lease_ran_out_may_be_used_again() -> None:
    cache = BlockCache(3, lease_ttl_s=10.0)
    put(cache, "ab")
    cache.lease(ME, T1, chain("a"), now=0)
    with pytest.raises(DuplicateTicket):
        cache.lease(ME, T1, chain("ab"), now=9.9)
    assert len(cache.lease(ME, T1, chain("ab"), now=10.0)) == 2


def test_what_ran_out_is_let_go_before_anything_is_evicted_ahead_of_demand() -> None:
    cache = BlockCache(10, high_watermark=0.5, low_watermark=0.5, reservation_ttl_s=30.0)
    put(cache, "abcde")
    cache.reserve(ME, T1, chain("vwxyz"), None, now=0)
    assert cache.evict_to_watermark(now=30.0) == []
    assert cache.n_stored == 5


def test_a_prompt_does_not_evict_its_own_beginning() -> None:
    cache = BlockCache(3)
    put(cache, "abc")
    with pytest.raises(CacheFull, match="this prompt's prefix"):
        cache.reserve(ME, T1, chain("abcd"), None, now=0)
    with pytest.raises(CacheFull):
        cache.reserve(ME, T1, [BlockHash(b"abcd")], BlockHash(b"abc"), now=0)
    assert sorted(cache.hashes()) == chain("abc")


def test_a_full_cache_changes_nothing_and_says_when_to_come_again() -> None:
    cache = BlockCache(2, reservation_ttl_s=30, lease_ttl_s=10)
    cache.reserve(YOU, T1, chain("a"), None, now=0)
    put(cache, "x", now=1)
    cache.lease(YOU, T2, chain("x"), now=2)
    with pytest.raises(CacheFull, match="1 blocks wanted; of 2 slots 1 are reserved, 1 lea") as e:
        cache.reserve(ME, T1, chain("q"), None, now=5)
    assert e.value.retry_after_s == 7
    cache.check()
    assert cache.reserve(ME, T1, chain("q"), None, now=12).evicted == [b"x"]


def test_a_cache_that_only_io_holds_says_a_time_all_the_same() -> None:
    cache = BlockCache(1)
    put(cache, "x")
    cache.add_to_lease(YOU, T1, BlockHash(b"x"), now=0, ttl_s=math.inf)
    with pytest.raises(CacheFull, match=r"retry in 1\.0 s") as e:
        cache.reserve(ME, T1, chain("q"), None, now=5)
    assert e.value.retry_after_s == 1


def test_a_reservation_runs_out() -> None:
    cache = BlockCache(2, reservation_ttl_s=30)
    cache.reserve(ME, T1, chain("ab"), None, now=0)
    with pytest.raises(UnknownTicket, match="older than 30 s"):
        cache.commit(ME, T1, [1, 2], now=30)
    assert (cache.n_reserved, cache.n_stored) == (0, 0)


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    cache = BlockCache(1, lease_ttl_s=10)
    put(cache, "a")
    cache.lease(ME, T1, chain("a"), now=0)
    assert cache.renew(ME, T1, now=9)
    cache.expire(now=15)
    assert cache.n_leased == 1
    assert not cache.renew(ME, T1, now=19)
    assert cache.n_leased == 0


def test_to_renew_a_reservation_makes_it_no_shorter() -> None:
    cache = BlockCache(1, reservation_ttl_s=10)
    cache.reserve(ME, T1, chain("a"), None, now=0, ttl_s=100)
    assert cache.renew(ME, T1, now=9)
    cache.expire(now=90)
    assert cache.n_reserved == 1


@pytest.mark.parametrize(
    ("checksums", "reason"),
    [
        ([1], "1 checksums for the 2 places"),
        ([0, -1], "checksum -1 of reservation 't1' is not one of"),
        ([0, 2**64], f"checksum {2**64} of reservation 't1' is not one of"),
    ],
)
def test_a_commit_with_wrong_checksums_can_be_made_good(checksums: list[int], reason: str) -> None:
    cache = BlockCache(2)
    cache.reserve(ME, T1, chain("ab"), None, now=0)
    with pytest.raises(ValueError, match=reason):
        cache.commit(ME, T1, checksums, now=0)
    cache.check()
    assert cache.commit(ME, T1, [1, 2**64 - 1], now=0) == chain("ab")
    with pytest.raises(UnknownTicket):
        cache.commit(ME, T1, [1, 2], now=0)


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.8), (-0.1, 0.5), (0.5, 1.1)])
def test_watermarks_out_of_order_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="watermarks must be"):
        BlockCache(4, low_watermark=low, high_watermark=high)


OWNERS = st.sampled_from([ME, YOU])
TICKETS = st.sampled_from([T1, T2, T3])
PROMPTS = st.text(alphabet="ab", min_size=1, max_size=4)


class CacheAgainstSets(RuleBasedStateMachine):
    """The cache beside sets: who is stored, reserved until when, leased until when."""

    N = 5
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(
            self.N, policy=self.policy, reservation_ttl_s=3, lease_ttl_s=2,
            high_watermark=0.8, low_watermark=0.4,
        )  # fmt: skip
        self.now = 0.0
        self.stored: dict[BlockHash, tuple[int, int]] = {}
        self.reserved: dict[tuple[str, Ticket], tuple[float, list[tuple[BlockHash, int]]]] = {}
        self.leased: dict[tuple[str, Ticket], tuple[float, list[BlockHash]]] = {}

    def expire(self) -> None:
        self.reserved = {k: v for k, v in self.reserved.items() if v[0] > self.now}
        self.leased = {k: v for k, v in self.leased.items() if v[0] > self.now}

    def pending(self) -> set[BlockHash]:
        return {block for _, places in self.reserved.values() for block, _ in places}

    def evictable(self, keep: Sequence[BlockHash]) -> set[BlockHash]:
        """Stored blocks that could go, perhaps after their children."""
        pinned = {block for _, blocks in self.leased.values() for block in blocks} | set(keep)

        def may_go(block: BlockHash) -> bool:
            children = [b for b in {*self.stored, *self.pending()} if b[:-1] == block]
            return block in self.stored and block not in pinned and all(map(may_go, children))

        return {block for block in self.stored if may_go(block)}

    def evicted(self, blocks: Sequence[BlockHash], keep: Sequence[BlockHash]) -> None:
        assert set(blocks) <= self.evictable(keep)
        for block in blocks:
            children = [b for b in {*self.stored, *self.pending()} if b[:-1] == block]
            assert not children, f"{block!r} went before {children}"
            del self.stored[block]

    @rule(owner=OWNERS, ticket=TICKETS, prompt=PROMPTS, start=st.integers(0, 3))
    def reserve(self, owner: str, ticket: Ticket, prompt: str, start: int) -> None:
        self.expire()
        blocks = chain(prompt)
        start = min(start, len(blocks) - 1)
        parent, blocks = (blocks[start - 1] if start else None), blocks[start:]
        key = (owner, ticket)
        if key in self.reserved or key in self.leased:
            with pytest.raises(DuplicateTicket, match=f"'{ticket}' of '{owner}' is in use"):
                self.cache.reserve(owner, ticket, blocks, parent, self.now)
            return
        missing = [b for b in blocks if b not in self.stored and b not in self.pending()]
        keep = [b for b in (*blocks, parent) if b is not None and b in self.stored]
        free = self.N - len(self.stored) - len(self.pending())
        possible = free + len(self.evictable(keep))
        if missing and not possible:
            before = sorted(self.cache.hashes())
            with pytest.raises(CacheFull):
                self.cache.reserve(owner, ticket, blocks, parent, self.now)
            assert sorted(self.cache.hashes()) == before
            return
        got = self.cache.reserve(owner, ticket, blocks, parent, self.now)
        assert [b for b, _ in got.places] == missing[:possible]
        assert len(got.evicted) == max(0, len(got.places) - free)
        self.evicted(got.evicted, keep)
        self.reserved[key] = (self.now + 3, got.places)

    @rule(owner=OWNERS, ticket=TICKETS)
    def commit(self, owner: str, ticket: Ticket) -> None:
        self.expire()
        if (owner, ticket) not in self.reserved:
            with pytest.raises(UnknownTicket):
                self.cache.commit(owner, ticket, [], self.now)
            return
        _, places = self.reserved.pop((owner, ticket))
        sums = [hash(block) & 0xFF for block, _ in places]
        stored = self.cache.commit(owner, ticket, sums, self.now)
        assert stored == [block for block, _ in places]
        for (block, slot), checksum in zip(places, sums, strict=True):
            self.stored[block] = (slot, checksum)

    @rule(owner=OWNERS, ticket=TICKETS)
    def revoke(self, owner: str, ticket: Ticket) -> None:
        known = self.reserved.pop((owner, ticket), None) is not None
        assert self.cache.revoke(owner, ticket) == known

    @rule(owner=OWNERS, ticket=TICKETS, prompt=PROMPTS)
    def lease(self, owner: str, ticket: Ticket, prompt: str) -> None:
        self.expire()
        key = (owner, ticket)
        if key in self.reserved or key in self.leased:
            with pytest.raises(DuplicateTicket):
                self.cache.lease(owner, ticket, chain(prompt), self.now)
            return
        got = self.cache.lease(owner, ticket, chain(prompt), self.now)
        expected = []
        for block in chain(prompt):
            if block not in self.stored:
                break
            expected.append((block, *self.stored[block]))
        assert [(place.hash, place.slot, place.checksum) for place in got] == expected
        if got:
            self.leased[key] = (self.now + 2, [place.hash for place in got])

    @rule(owner=OWNERS, ticket=TICKETS)
    def renew(self, owner: str, ticket: Ticket) -> None:
        self.expire()
        leased, reserved = self.leased.get((owner, ticket)), self.reserved.get((owner, ticket))
        known = leased is not None or reserved is not None
        assert self.cache.renew(owner, ticket, self.now) == known
        if leased is not None:
            self.leased[owner, ticket] = (self.now + 2, leased[1])
        if reserved is not None:
            self.reserved[owner, ticket] = (self.now + 3, reserved[1])

    @rule(owner=OWNERS, ticket=TICKETS)
    def release(self, owner: str, ticket: Ticket) -> None:
        known = self.leased.pop((owner, ticket), None) is not None
        assert self.cache.release(owner, ticket) == known

    @rule(owner=OWNERS)
    def client_gone(self, owner: str) -> None:
        self.cache.forget_owner(owner)
        self.reserved = {k: v for k, v in self.reserved.items() if k[0] != owner}
        self.leased = {k: v for k, v in self.leased.items() if k[0] != owner}

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire(self.now)
        self.expire()

    @rule()
    def relieve(self) -> None:
        self.expire()
        used = len(self.stored) + len(self.pending())
        wanted = used - 2 if used > 4 else 0
        wanted = min(wanted, len(self.evictable([])))
        evicted = self.cache.evict_to_watermark(self.now)
        assert len(evicted) == wanted
        self.evicted(evicted, [])

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()
        assert sorted(self.cache.hashes()) == sorted(self.stored)
        assert self.cache.n_stored == len(self.stored)
        assert self.cache.n_reserved == len(self.pending())
        leased = {block for _, blocks in self.leased.values() for block in blocks}
        assert self.cache.n_leased == len(leased)


class FifoCacheAgainstSets(CacheAgainstSets):
    policy = "fifo"


class LfuCacheAgainstSets(CacheAgainstSets):
    policy = "lfu"


class PatientCacheAgainstSets(CacheAgainstSets):
    policy = "patience"


TestLruCache = model_test(CacheAgainstSets, at_night=180)
TestFifoCache = model_test(FifoCacheAgainstSets, at_night=180)
TestLfuCache = model_test(LfuCacheAgainstSets, at_night=180)
TestPatientCache = model_test(PatientCacheAgainstSets, at_night=180)
