"""Manage an instance's pages, some of which keep the KV of finished prompts.

    free ──▶ held by requests ──▶ free, or, with a known prefix: kept ──▶ held again, or evicted

This is the pool of stock engines with prefix caching. Kept pages are evicted when a request needs
them, the page unused longest first.
"""

from collections.abc import Sequence

from halfmoon_scheduling.cache.eviction_policies import Lru
from halfmoon_scheduling.decode.page_allocator import OutOfPages, PageAllocator


class PrefixCachingPool:
    """A `PageAllocator` with a memory."""

    def __init__(self, n_pages: int, *, caching: bool) -> None:
        self.pages = PageAllocator(n_pages)
        self._caching = caching
        #: Pages by their block; the pool itself is one holder of each.
        self._known: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        #: Pages of blocks that the pool alone holds.
        self._kept = Lru()

    @property
    def n_available(self) -> int:
        """Pages that are free or may be evicted."""
        return self.pages.n_free + len(self._kept)

    def knows(self, page: int) -> bool:
        """Return whether this page has the KV of a known block."""
        return page in self._blocks

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, are known."""
        n = 0
        for block in blocks:
            if block not in self._known:
                break
            n += 1
        return n

    def reuse(self, blocks: Sequence[int]) -> list[int]:
        """Hold the pages of known blocks."""
        pages = [self._known[block] for block in blocks]
        for page in pages:
            if self.pages.n_holders(page) == 1:
                self._kept.remove(page)
        self.pages.share(pages)
        return pages

    def allocate(self, n: int) -> list[int]:
        """Take pages, evicting what is kept if need be.

        Raises:
            OutOfPages: not so many are available; nothing changes.
        """
        if n > self.n_available:
            raise OutOfPages(n, self.n_available, self.pages.n_pages)
        while self.pages.n_free < n:
            page = next(self._kept.candidates())
            self._kept.remove(page)
            del self._known[self._blocks.pop(page)]
            self.pages.release([page])
        return self.pages.allocate(n)

    def learn(self, blocks: Sequence[int], pages: Sequence[int]) -> None:
        """Record that these held pages have the KV of these blocks."""
        if not self._caching:
            return
        for block, page in zip(blocks, pages, strict=True):
            if block not in self._known:
                self._known[block] = page
                self._blocks[page] = block
                self.pages.share([page])

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; the last ones of a prompt are the first to be evicted."""
        self.pages.release(pages)
        for page in reversed(pages):
            if page in self._blocks and self.pages.n_holders(page) == 1:
                self._kept.insert(page, key=page)

    def check(self) -> None:
        """Audit: what is kept has no other holder."""
        self.pages.check()
        assert {page: block for block, page in self._known.items()} == self._blocks
        kept = set(self._kept.candidates())
        assert kept == {page for page in self._blocks if self.pages.n_holders(page) == 1}
