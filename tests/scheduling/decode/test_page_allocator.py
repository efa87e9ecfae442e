import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
