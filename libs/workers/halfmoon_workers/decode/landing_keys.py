"""Hand out the right to write a landing, for its own pages and for as long as it lasts.

A prefill that can't be told to stop may write late. Its key is taken back before the pages are
another request's, so decode's memory refuses it.
"""

from collections.abc import Sequence

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.regions import Landing, Region
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.interface import Overloaded, Rejected
from halfmoon_transfer.regions.grant_revocation import GrantRevocation


class NoLandingKey(Exception):
    """A landing that gets no key: the pool is not registered, or has lent too many."""


class LandingKeys:
    """The keys of the landings of one pool."""

    def __init__(
        self,
        region: Region,
        layout: KvLayout,
        ttl_s: float,
        lender: GrantLender[RequestId] | None = None,
    ) -> None:
        """Have no landings.

        Args:
            region: the pool.
            layout: of its pages.
            ttl_s: seconds until a landing is given up.
            lender: of the pool; None: each landing gets the pool's own key.
        """
        self._region = region
        self._layout = layout
        self._ttl_s = ttl_s
        self._lender = lender

    def open(self, request_id: RequestId, pages: Sequence[int], n_held_blocks: int) -> Landing:
        """Return a new landing with a key to write its pages, those held already left out.

        Args:
            request_id: of the landing.
            pages: of the landing, in the order of its blocks.
            n_held_blocks: blocks at its beginning that others read; less than there are pages.

        Raises:
            NoLandingKey: nothing is lent.
        """
        size = self._layout.block_bytes
        region = self._region
        if self._lender is not None:
            ranges = [(page * size, size) for page in pages[n_held_blocks:]]
            try:
                region = self._lender.lend(request_id, ranges, "write", self._ttl_s)
            except (Rejected, Overloaded) as error:
                raise NoLandingKey(str(error)) from None
        return Landing(region, tuple(pages), self._layout)

    def region_of(self, request_id: RequestId) -> Region:
        """Return the region as a landing names it."""
        return self._region if self._lender is None else self._lender.lent_to(request_id)

    def close(self, request_id: RequestId) -> GrantRevocation | None:
        """Take a landing's key back; its pages are freed or computed on when that is over.

        Returns:
            Tells when no byte lands any more; None if the key is the pool's own, which goes on.
        """
        return None if self._lender is None else self._lender.begin_take_back(request_id)

    def cut(self) -> None:
        """Cut the connections by which peers reach the pool, with what is on its way there.

        Peers send again over others, unless they gave up.
        """
        if self._lender is not None:
            self._lender.cut()

    def is_quiet(self) -> bool:
        """Return whether no write goes on over a connection that was cut."""
        return self._lender is None or self._lender.is_quiet()

    def check(self, landing: set[RequestId]) -> None:
        """Audit: landings alone have keys of grants."""
        if self._lender is not None:
            assert set(self._lender.holders()) <= landing
