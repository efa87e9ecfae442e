import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.decode.page_allocator import OutOfPages, PageAllocator
from tests.scheduling.models import model_test


def test_too_many_pages_are_refused_with_the_numbers_and_none_is_taken() -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 are free") as caught:
        pages.allocate(2)
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 4)
    assert pages.n_free == 1


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_of_another_pool_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match="not one of the pool's 0 to 2"):
        PageAllocator(3).release([page])
    with pytest.raises(ValueError, match="n_pages is 0"):
        PageAllocator(0)


def test_pages_that_nothing_knows_go_first_then_the_least_recently_used_last_block_first() -> None:
    pages = PageAllocator(6)
    old, new = pages.allocate(2), pages.allocate(2)
    for i, page in enumerate([*old, *new]):
        pages.keep(page, BlockHash(bytes([i])))
    pages.release(old)
    pages.release(new)
    assert set(pages.allocate(2)).isdisjoint([*old, *new])
    assert pages.allocate(4) == [old[1], old[0], new[1], new[0]]
    assert pages.kept.longest_prefix([BlockHash(b"\0")]) == []


def test_a_chain_that_names_a_block_twice_gets_its_page_once() -> None:
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.keep(page, BlockHash(b"x"))
    assert pages.kept.longest_prefix([BlockHash(b"x")] * 2) == [page]


def test_a_free_page_can_be_neither_kept_nor_held() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="is free, it has no holder"):
        pages.keep(0, BlockHash(b"x"))
    with pytest.raises(ValueError, match="is free, it has no holder"):
        pages.hold([1])


class PagesAgainstCounts(RuleBasedStateMachine):
    """The allocator beside a plain count of holders per page."""

    N = 6

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(self.N)
        self.holders = dict.fromkeys(range(self.N), 0)

    @rule(n=st.integers(0, 4))
    def allocate(self, n: int) -> None:
        free = {page for page, count in self.holders.items() if count == 0}
        if n > len(free):
            with pytest.raises(OutOfPages):
                self.pages.allocate(n)
            return
        got = self.pages.allocate(n)
        assert len(set(got)) == n
        assert set(got) <= free
        for page in got:
            self.holders[page] = 1

    @rule(named=st.lists(st.integers(0, N - 1), max_size=4))
    def share(self, named: list[int]) -> None:
        if any(self.holders[page] == 0 for page in named):
            with pytest.raises(ValueError, match="is free"):
                self.pages.share(named)
            return
        self.pages.share(named)
        for page in named:
            self.holders[page] += 1

    @rule(named=st.lists(st.integers(0, N - 1), max_size=4))
    def release(self, named: list[int]) -> None:
        if any(named.count(page) > self.holders[page] for page in named):
            with pytest.raises(ValueError, match="page"):
                self.pages.release(named)
            return
        self.pages.release(named)
        for page in named:
            self.holders[page] -= 1

    @invariant()
    def counts_agree(self) -> None:
        self.pages.check()
        assert {page: self.pages.n_holders(page) for page in range(self.N)} == self.holders
        assert self.pages.n_free == sum(count == 0 for count in self.holders.values())


TestPagesAgainstCounts = model_test(PagesAgainstCounts, at_night=120)
