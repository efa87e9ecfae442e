"""Allocate the pages of a pool by number, and count the holders of each.

A page is the memory of one KV block in a worker. Only numbers live here; the engine owns the bytes.
A page without holders is free. Its bytes may be of use all the same: `KeptPages` knows the pages
with complete blocks, and they are allocated after all other free ones.
"""

from collections import Counter
from collections.abc import Iterable

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.decode.kept_pages import KeptPages


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
        #: Free pages that are not known, the next one to allocate last.
        self._free: list[int] = list(range(n_pages - 1, -1, -1))
        #: Holders of each page; 0 exactly for the pages in `_free` and the unheld ones in `kept`.
        self._holders: list[int] = [0] * n_pages
        #: Read by others, changed here alone.
        self.kept = KeptPages()

    @property
    def n_free(self) -> int:
        """Pages without holders."""
        return len(self._free) + self.kept.n_unheld

    def allocate(self, n: int) -> list[int]:
        """Allocate `n` pages; the caller is the only holder of each.

        Raises:
            OutOfPages: fewer than `n` are free; nothing changes.
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"{n} pages wanted, the least is 0")
        if n > self.n_free:
            raise OutOfPages(n, self.n_free, self.n_pages)
        pages = [self._free.pop() if self._free else self.kept.evict() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def keep(self, page: int, block: BlockHash) -> None:
        """Keep a page that has a complete block, to be found until its memory is wanted.

        Nothing writes to the page from now on, until it is allocated anew.

        Raises:
            ValueError: it is free or no page of this pool.
        """
        self._require_held([page])
        self.kept.put(page, block)

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages, which are held or kept.

        Raises:
            ValueError: one of them is neither; nothing changes.
        """
        pages = list(pages)
        self._require_held(page for page in pages if not self.kept.is_unheld(page))
        for page in pages:
            if self._holders[page] == 0:
                self.kept.on_held(page)
            self._holders[page] += 1

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

        Args:
            pages: in the order of their blocks.

        Raises:
            ValueError: a page is free, is listed more often than it is held, or is not of this
                pool; nothing changes.
        """
        pages = list(pages)
        self._require_held(pages)
        if len(set(pages)) < len(pages):
            for page, n in Counter(pages).items():
                if n > self._holders[page]:
                    raise ValueError(f"page {page} is released more often than it is held")
        unheld: list[int] = []
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                (unheld if page in self.kept else self._free).append(page)
        self.kept.on_unheld(unheld)

    def n_holders(self, page: int) -> int:
        """Return the number of holders of a page; 0 when it is free."""
        return self._holders[page]

    def check(self) -> None:
        """Check that a page without holders is free once, kept or not, and no other is."""
        self.kept.check()
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(holders >= 0 for holders in self._holders)
        unheld = {page for page, holders in enumerate(self._holders) if holders == 0}
        kept = {page for page in range(self.n_pages) if self.kept.is_unheld(page)}
        assert not any(page in self.kept for page in self._free), "a page is kept and is not found"
        free = {*self._free, *kept}
        assert unheld == free, f"free pages and holders differ: {unheld ^ free}"

    def _require_held(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not 0 <= page < self.n_pages:
                raise ValueError(f"page {page} is not one of the pool's 0 to {self.n_pages - 1}")
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is free, it has no holder")
