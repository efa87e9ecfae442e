"""What a server has cached, over its ranks, and what is guessed of one without events."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from halfmoon_servers.bridge import held_blocks
from halfmoon_servers.bridge.held_blocks import HeldBlocks
from halfmoon_servers.bridge.recent_blocks import RecentBlocks


def block(i: int) -> BlockHash:
    return BlockHash(bytes([i]) * 16)


def stored(*numbers: int) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(map(block, numbers)),
        parent_block_hash=None,
        token_ids=(),
        block_size=16,
    )


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=tuple(map(block, numbers)))


def applied(held: set[BlockHash], events: list[KvEvent]) -> set[BlockHash]:
    """What a listener to these events knows afterwards."""
    for event in events:
        match event:
            case BlockStored(block_hashes=hashes):
                held |= {BlockHash(bytes(h)) for h in hashes if isinstance(h, bytes)}
            case BlockRemoved(block_hashes=hashes):
                held -= {BlockHash(bytes(h)) for h in hashes if isinstance(h, bytes)}
            case AllBlocksCleared():
                held = set()
    return held


NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
EVENTS = st.one_of(
    NUMBERS.map(lambda numbers: stored(*numbers)),
    NUMBERS.map(lambda numbers: removed(*numbers)),
    st.just(AllBlocksCleared()),
)


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 2), EVENTS), max_size=30))
def test_listeners_know_the_union_of_all_ranks(
    n_ranks: int, steps: list[tuple[int, KvEvent]]
) -> None:
    held, known = HeldBlocks(n_ranks), set[BlockHash]()
    ranks = [set[BlockHash]() for _ in range(n_ranks)]
    for rank, event in steps:
        rank %= n_ranks
        ranks[rank] = applied(ranks[rank], [event])
        known = applied(known, held.apply(rank, [event]))
        assert known == set().union(*ranks) == set(held.held())
        assert len(held) == len(known)
        prompt = [block(i) for i in range(6)]
        leading = [next((i for i, b in enumerate(prompt) if b not in r), 6) for r in ranks]
        assert held.n_leading(prompt) == max(leading)


def test_long_events_are_cut_so_that_each_fits_a_message() -> None:
    n = held_blocks.MAX_EVENT_HASHES
    hashes = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(2 * n + 1))
    event = BlockStored(
        block_hashes=hashes, parent_block_hash=block(9), token_ids=(), block_size=16
    )
    parts = [p for p in HeldBlocks(1).apply(0, [event]) if isinstance(p, BlockStored)]
    assert [len(p.block_hashes) for p in parts] == [n, n, 1]
    parents = [p.parent_block_hash for p in parts]
    assert parents == [block(9), hashes[n - 1], hashes[2 * n - 1]]


def test_a_guessed_cache_keeps_what_was_used_last_and_the_starts_of_prompts() -> None:
    recent, known = RecentBlocks(4, 16), set[BlockHash]()
    known = applied(known, recent.use([block(0), block(1), block(2)]))
    known = applied(known, recent.use([block(0), block(5)]))
    assert known == {block(0), block(1), block(2), block(5)}
    known = applied(known, recent.use([block(7)]))
    assert known == {block(0), block(1), block(5), block(7)}, "the end of the first went"
    assert recent.use([block(7)]) == []


@given(st.integers(1, 6), st.lists(NUMBERS, max_size=20))
def test_a_guessed_cache_is_bounded_and_tells_each_change(
    capacity: int, prompts: list[list[int]]
) -> None:
    recent, known = RecentBlocks(capacity, 16), set[BlockHash]()
    for prompt in prompts:
        hashes = [block(i) for i in dict.fromkeys(prompt)]
        known = applied(known, recent.use(hashes))
        assert len(known) <= capacity
        assert set(hashes[:capacity]) <= known
