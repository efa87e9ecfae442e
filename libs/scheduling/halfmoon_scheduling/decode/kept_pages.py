"""Find pages by the blocks whose KV they have, and choose those to give up first.

    allocated ──put──▶ known, held ──last holder gone──▶ known, unheld ──evict──▶ allocated anew
                            ▲                                   │
                            └────────── a new holder ───────────┘

A known page is written no more, so several requests may read it. One without holders counts as
free: it is given up whenever the pool has no other free page, least recently used first. Of pages
that become unheld together, a block is given up before the block that it continues.
"""

from collections.abc import Iterable, Sequence

from halfmoon_protocol.ids import BlockHash


class KeptPages:
    """The known pages of one pool."""

    def __init__(self) -> None:
        """Know no page."""
        #: Two ways to say the same: each known page has one block, each block one page.
        self._page_of: dict[BlockHash, int] = {}
        self._block_in: dict[int, BlockHash] = {}
        #: Known pages without holders, the next one to give up first.
        self._unheld: dict[int, None] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._block_in

    @property
    def n_unheld(self) -> int:
        """Known pages without holders."""
        return len(self._unheld)

    def put(self, page: int, block: BlockHash) -> None:
        """Know a held page by its block; a block that another page has stays with that one."""
        if block not in self._page_of and page not in self._block_in:
            self._page_of[block] = page
            self._block_in[page] = block

    def longest_prefix(self, blocks: Sequence[BlockHash]) -> list[int]:
        """Return the pages of the first blocks, up to the first one that no page has."""
        pages: dict[int, None] = {}
        for block in blocks:
            page = self._page_of.get(block)
            if page is None or page in pages:  # a chain has no block twice
                break
            pages[page] = None
        return list(pages)

    def is_unheld(self, page: int) -> bool:
        """Return whether a page is known and has no holder."""
        return page in self._unheld

    def on_held(self, page: int) -> None:
        """Take in that an unheld page has a holder."""
        del self._unheld[page]

    def on_unheld(self, pages: Iterable[int]) -> None:
        """Take in that known pages have no holder any more, in the order of their blocks."""
        for page in reversed(list(pages)):
            self._unheld[page] = None

    def evict(self) -> int:
        """Forget the unheld page that was used least recently, and return it."""
        page = next(iter(self._unheld))
        del self._unheld[page]
        del self._page_of[self._block_in.pop(page)]
        return page

    def check(self) -> None:
        """Check that both maps say the same, and that unheld pages are known."""
        assert self._page_of == {block: page for page, block in self._block_in.items()}
        assert self._unheld.keys() <= self._block_in.keys()
