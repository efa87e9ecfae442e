"""Allocate the pages of a pool by number, and count the holders of each.

A page is the memory of one KV block in a worker. Only numbers live here; the engine owns the bytes.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """An allocation of more pages than are free; nothing was allocated."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} of {total} are free")
        self.wanted = wanted
        self.free = free
        self.total = total


class PageAllocator:
    """Allocate pages and count their holders; a page without holders is free."""

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages is {n_pages}, a pool has at least 1")
        self.n_pages = n_pages
        #: Free pages, the next one to allocate last. Disjoint from held pages.
        self._free: list[int] = list(range(n_pages - 1, -1, -1))
        #: Holders of each page; 0 exactly for the pages in `_free`.
        self._holders: list[int] = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages without holders."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Allocate `n` pages; the caller is the only holder of each.

        Raises:
            OutOfPages: fewer than `n` are free; nothing changes.
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"{n} pages wanted, the least is 0")
        if n > len(self._free):
            raise OutOfPages(n, len(self._free), self.n_pages)
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages.

        Raises:
            ValueError: one of them is free or no page of this pool; nothing changes.
        """
        pages = list(pages)
        self._require_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each of these pages; a page without holders is free.

        Raises:
            ValueError: a page is free, is listed more often than it is held, or is not of this
                pool; nothing changes.
        """
        pages = list(pages)
        self._require_held(pages)
        for done, page in enumerate(pages):
            if self._holders[page] == 0:  # listed more often than it is held
                self._undo_release(pages[:done])
                raise ValueError(f"page {page} is released more often than it is held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def n_holders(self, page: int) -> int:
        """Return the number of holders of a page; 0 when it is free."""
        return self._holders[page]

    def check(self) -> None:
        """Check that a page is in the free list once if it has no holder, else never."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(holders >= 0 for holders in self._holders)
        unheld = {page for page, holders in enumerate(self._holders) if holders == 0}
        assert unheld == set(self._free), f"free list and holders differ: {unheld ^ {*self._free}}"

    def _require_held(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < self.n_pages:
                raise ValueError(f"page {page} is not one of the pool's 0 to {self.n_pages - 1}")
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free, it has no holder")

    def _undo_release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            if self._holders[page] == 0:
                self._free.pop()
            self._holders[page] += 1
