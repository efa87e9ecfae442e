"""Pins: what they hold, until when, and that every eviction policy and watermark heeds them."""

import pytest

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull
from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES
from halfmoon_scheduling.cache.pins import Pin, PinRefused, Pins

A, AB, ABC, ABD = (BlockHash(name) for name in (b"a", b"ab", b"abc", b"abd"))
FOREVER_S = float("inf")
HARD, SOFT = Pin("hard", FOREVER_S), Pin("soft", FOREVER_S)


def put(cache: BlockCache, names: str, parent: BlockHash | None = None) -> list[BlockHash]:
    """Store a chain of blocks with these one-letter names; what went for it."""
    blocks = [BlockHash(name.encode()) for name in names]
    reserved = cache.reserve("me", Ticket(names), blocks, parent, now=0)
    cache.commit("me", Ticket(names), [0] * len(reserved.places), now=0)
    return reserved.evicted


def test_a_hard_pin_holds_what_is_before_it_as_long_as_one_needs_it() -> None:
    pins = Pins(max_held=4)
    pins.pin(ABC, HARD, before=[AB, A])
    pins.pin(ABD, HARD, before=[AB, A])
    assert set(pins.held) == {A, AB, ABC, ABD} and pins.n_hard == 2
    pins.check()
    assert pins.unpin(ABC)
    assert set(pins.held) == {A, AB, ABD}
    pins.check()
    assert pins.unpin(ABD) and not pins.unpin(ABD)
    assert not pins.held


def test_the_last_word_on_a_block_counts() -> None:
    pins = Pins(max_held=4)
    pins.pin(AB, HARD, before=[A])
    pins.pin(AB, HARD, before=[A])
    assert pins.n_held == 2
    pins.pin(AB, SOFT, before=[A])
    assert (pins.n_held, pins.n_soft, pins.n_hard) == (0, 1, 0)
    pins.pin(AB, Pin("hard", 5.0), before=[A])
    assert (pins.n_held, pins.n_soft, pins.n_hard) == (2, 0, 1)
    pins.check()
    pins.expire(now=5.0)
    assert pins.get(AB) is None and not pins.held


def test_pins_end_by_time_each_for_itself() -> None:
    pins = Pins(max_held=4)
    pins.pin(A, Pin("soft", 10.0), before=[])
    pins.pin(ABC, Pin("hard", 20.0), before=[AB, A])
    pins.expire(now=9.9)
    assert pins.n_soft == 1
    pins.expire(now=10.0)
    assert (pins.n_soft, pins.n_hard) == (0, 1)
    pins.expire(now=20.0)
    assert pins.n_hard == 0
    pins.check()


def test_hard_pins_hold_no_more_than_they_may_together_and_say_so() -> None:
    pins = Pins(max_held=3)
    pins.pin(ABC, HARD, before=[AB, A])
    with pytest.raises(PinRefused, match=r"1 more blocks, and 3 of 3 .* hard_pin_share"):
        pins.pin(ABD, HARD, before=[AB, A])
    assert pins.get(ABD) is None
    pins.pin(ABD, SOFT, before=[AB, A])
    pins.pin(AB, HARD, before=[A])  # held already
    pins.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_under_every_policy_hard_pinned_blocks_stay_and_soft_pinned_ones_go_last(
    policy: str,
) -> None:
    cache = BlockCache(6, policy=policy, pins=Pins(max_held=2))
    for name in "abcdef":
        put(cache, name)
    cache.pins.pin(BlockHash(b"a"), HARD, before=[])
    cache.pins.pin(BlockHash(b"b"), SOFT, before=[])
    gone = [block for name in "uvwx" for block in put(cache, name)]
    assert not {b"a", b"b"} & set(gone)
    for name in "uvwx":  # those that came, and c to f, may all be read meanwhile
        cache.lease("you", Ticket(name), [BlockHash(name.encode())], now=0)
    left = [block for block in cache.hashes() if block not in (b"a", b"b", b"u", b"v", b"w", b"x")]
    gone = [block for i in range(len(left) + 1) for block in put(cache, str(i))]
    assert gone[len(left)] == b"b"
    assert BlockHash(b"a") in cache
    cache.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_above_the_watermark_pinned_blocks_stay_too(policy: str) -> None:
    cache = BlockCache(
        8, policy=policy, high_watermark=0.5, low_watermark=0.25, pins=Pins(max_held=3)
    )
    put(cache, "abc")
    put(cache, "defgh")
    cache.pins.pin(BlockHash(b"c"), HARD, before=[BlockHash(b"b"), BlockHash(b"a")])
    cache.pins.pin(BlockHash(b"h"), SOFT, before=[])
    # Soft-pinned h goes, since down to two blocks nothing else can; d to g are before it.
    assert cache.evict_to_watermark(now=0) == [b"h", b"g", b"f", b"e", b"d"]
    assert sorted(cache.hashes()) == [b"a", b"b", b"c"]
    cache.check()


def test_a_soft_pinned_block_keeps_its_prefix_until_it_goes() -> None:
    cache = BlockCache(4, pins=Pins())
    put(cache, "ab")
    put(cache, "x")
    put(cache, "y")
    cache.pins.pin(BlockHash(b"b"), SOFT, before=[])
    assert put(cache, "12") == [b"x", b"y"]
    cache.lease("you", Ticket("l"), [BlockHash(b"1"), BlockHash(b"2")], now=0)
    assert put(cache, "34") == [b"b", b"a"]


def test_a_full_cache_says_how_much_of_it_is_pinned() -> None:
    cache = BlockCache(2, pins=Pins(max_held=2))
    put(cache, "ab")
    cache.pins.pin(BlockHash(b"b"), HARD, before=[BlockHash(b"a")])
    with pytest.raises(CacheFull, match="2 held by hard pins") as refused:
        put(cache, "x")
    assert refused.value.retry_after_s > 0
    cache.pins.unpin(BlockHash(b"b"))
    assert put(cache, "x") == [b"b"]
