import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from tests.scheduling.models import model_test

W = [WorkerId(f"kvstore-{i}") for i in range(4)]

#: Workers of the state machine with one block each.
N_EARLIER = 70


def blocks(*names: int) -> list[BlockHash]:
    return [BlockHash(name.to_bytes(16, "big")) for name in names]


def test_a_worker_that_is_gone_is_forgotten_at_once_and_its_blocks_go_in_pieces() -> None:
    index = PrefixIndex()
    many = [BlockHash(i.to_bytes(16, "big")) for i in range(1000)]
    index.add(W[0], many)
    index.add(W[1], many[:100])
    index.drop(W[0])
    index.add(W[2], many[:50])
    assert (len(index), len(index._holders)) == (100, 1000)
    assert index.longest_prefix(many) == {W[1]: 100, W[2]: 50}
    assert index.n_holders(many[0]) == 2
    sizes = []
    while index.sweep(300):
        index.check()
        sizes.append(len(index._holders))
    assert sizes == [700, 400, 100]
    assert len(index) == len(index._holders) == 100
    index.add(W[0], many[:1])
    assert index.longest_prefix(many) == {W[0]: 1, W[1]: 100, W[2]: 50}
    assert len(index._workers) == 3, "the slot is used again"


class CountedPrompt(list[BlockHash]):
    """Counts how many of its blocks were looked at."""

    looked_at = 0

    def __getitem__(self, i: object) -> BlockHash:  # type: ignore[override]
        self.looked_at += 1
        return super().__getitem__(i)  # type: ignore[call-overload,no-any-return]

    def __iter__(self) -> Iterator[BlockHash]:
        raise AssertionError("the whole prompt was walked")


def test_the_walk_stops_at_the_first_block_that_nobody_left_holds() -> None:
    index = PrefixIndex()
    for worker in W:
        index.add(worker, blocks(1, 2))
    prompt = CountedPrompt(blocks(*range(1, 1001)))
    assert set(index.longest_prefix(prompt).values()) == {2}
    assert prompt.looked_at == 3


@pytest.mark.parametrize("n_workers", [1, 512])
def test_a_block_costs_at_most_200_bytes(n_workers: int) -> None:
    n = 100_000
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for i in range(n_workers):
            worker = WorkerId(f"kvstore-{i}")
            index.add(worker, (BlockHash(j.to_bytes(16, "big")) for j in range(i, n, n_workers)))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == n
    assert used_bytes / n <= 200


class IndexAgainstSets(RuleBasedStateMachine):
    """The index beside one set of blocks per worker."""

    WORKERS = st.sampled_from(W)
    BLOCKS = st.lists(st.integers(0, 7), max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        # Sets of later workers are large numbers, of which equal ones are not always one object.
        for i in range(N_EARLIER):
            self.index.add(WorkerId(f"earlier-{i}"), blocks(100 + i))
        self.held: dict[WorkerId, set[BlockHash]] = {worker: set() for worker in W}

    @rule(worker=WORKERS, names=BLOCKS)
    def stored(self, worker: WorkerId, names: list[int]) -> None:
        self.index.add(worker, blocks(*names))
        self.held[worker] |= set(blocks(*names))

    @rule(worker=WORKERS, names=BLOCKS)
    def removed(self, worker: WorkerId, names: list[int]) -> None:
        self.index.remove(worker, blocks(*names))
        self.held[worker] -= set(blocks(*names))

    @rule(worker=WORKERS, names=BLOCKS)
    def replace(self, worker: WorkerId, names: list[int]) -> None:
        self.index.clear(worker)
        self.index.add(worker, blocks(*names))
        self.held[worker] = set(blocks(*names))

    @rule(worker=WORKERS)
    def drop(self, worker: WorkerId) -> None:
        self.index.drop(worker)
        self.held[worker] = set()

    @rule(n=st.integers(1, 9))
    def sweep(self, n: int) -> None:
        self.index.sweep(n)

    @rule(names=BLOCKS)
    def look(self, names: list[int]) -> None:
        prompt = blocks(*names)
        expected = {}
        for worker, held in self.held.items():
            n = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
            if n:
                expected[worker] = n
        assert self.index.longest_prefix(prompt) == expected

    @invariant()
    def sizes_agree(self) -> None:
        self.index.check()
        assert len(self.index) == N_EARLIER + len(set().union(*self.held.values()))
        assert {w: self.index.n_blocks(w) for w in W} == {w: len(h) for w, h in self.held.items()}


TestIndexAgainstSets = model_test(IndexAgainstSets, at_night=180)
