"""Pages of a pool, by number: which are free, and how many hold each of the others.

A page is what one KV block occupies in a worker's memory. Only numbers live here; the bytes
belong to the engine.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} of {total} are free")
        self.wanted = wanted
        self.free = free
        self.total = total


class PageAllocator:
    """Hands out pages and counts their holders; a page is free when the last one lets go."""

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages is {n_pages}, a pool has at least 1")
        self.n_pages = n_pages
        #: Pages that nobody holds, the next one to hand out last. Disjoint from held pages.
        self._free: list[int] = list(range(n_pages - 1, -1, -1))
        #: Holders of each page; 0 exactly for the pages in `_free`.
        self._holders: list[int] = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages; the caller is the one holder of each.

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
        """Add one holder to each of these pages.

        Raises:
            ValueError: one of them is free or no page of this pool; nothing changes.
        """
        pages = list(pages)
        self._require_held(pages)
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder off each of these pages; without any left it is free.

        Raises:
            ValueError: one of them is free (or is named more often than it is held) or is no
                page of this pool; nothing changes.
        """
        pages = list(pages)
        self._require_held(pages)
        for done, page in enumerate(pages):
            if self._holders[page] == 0:  # named more often than it is held
                self._undo_release(pages[:done])
                raise ValueError(f"page {page} is released more often than it is held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def n_holders(self, page: int) -> int:
        """How many hold this page; 0 when it is free."""
        return self._holders[page]

    def check(self) -> None:
        """Audit: a page is in the free list exactly once if it has no holder, else never."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(holders >= 0 for holders in self._holders)
        unheld = {page for page, holders in enumerate(self._holders) if holders == 0}
        assert unheld == set(self._free), f"free list and holders differ: {unheld ^ {*self._free}}"

    def _require_held(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < self.n_pages:
                raise ValueError(f"page {page} is not one of the pool's 0 to {self.n_pages - 1}")
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free, nobody holds it")

    def _undo_release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            if self._holders[page] == 0:
                self._free.pop()
            self._holders[page] += 1
