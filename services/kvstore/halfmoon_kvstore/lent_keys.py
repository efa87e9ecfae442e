"""Hand out the right to read a lease's blocks, or to write a reservation's, while it lasts.

A writer may also read its places: the first stage of a group so learns the checksums of what the
others wrote.

The cache says when either ends, before their slots can be another's. The key is taken back then:
what comes late is refused, and a block never changes after its commit.
"""

from collections.abc import Iterable

from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.regions import Region
from halfmoon_scheduling.cache.block_cache import BlockCache
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.interface import Overloaded, Rejected

#: What has a key: a lease or a reservation, by owner and ticket.
Holder = tuple[str, Ticket]


class NoKeyLeft(Exception):
    """A lease or reservation that gets no key, since too many are lent."""


class LentKeys:
    """The keys of one node's leases and reservations."""

    def __init__(self, region: Region, lender: GrantLender[Holder] | None = None) -> None:
        """Have lent nothing.

        Args:
            region: memory of the blocks.
            lender: of this region; None: everything gets the region's own key.
        """
        self._region = region
        self._lender = lender
        self._block_bytes = 0

    def follow(self, memory: BlockCache, block_bytes: int) -> None:
        """Take keys back as leases and reservations of this cache end.

        Args:
            memory: decides about the slots of the region.
            block_bytes: size of a slot.
        """
        self._block_bytes = block_bytes
        if self._lender is not None:
            memory.on_ended = self._on_ended

    def lend_to_write(self, holder: Holder, slots: Iterable[int], ttl_s: float) -> Region:
        """Return the region with a key to write and read these slots, for a new reservation.

        Raises:
            NoKeyLeft: nothing is lent.
        """
        return self._lend(holder, slots, writes=True, ttl_s=ttl_s)

    def lend_to_read(self, holder: Holder, slots: Iterable[int], ttl_s: float) -> Region:
        """Return the region with a key to read these slots, for a new lease.

        Raises:
            NoKeyLeft: nothing is lent.
        """
        return self._lend(holder, slots, writes=False, ttl_s=ttl_s)

    def _lend(self, holder: Holder, slots: Iterable[int], *, writes: bool, ttl_s: float) -> Region:
        if self._lender is None:
            return self._region
        size = self._block_bytes
        ranges = [(slot * size, size) for slot in slots]
        try:
            return self._lender.lend(holder, ranges, "both" if writes else "read", ttl_s)
        except (Overloaded, Rejected) as error:
            raise NoKeyLeft(str(error)) from None

    def on_renewed(self, holder: Holder, ttl_s: float) -> None:
        """Let a renewed lease's or reservation's key end so many seconds from now."""
        if self._lender is not None:
            self._lender.extend(holder, ttl_s)

    def _on_ended(self, owner: str, ticket: Ticket) -> None:
        assert self._lender is not None
        self._lender.take_back((owner, ticket))

    def check(self, memory: BlockCache) -> None:
        """Audit: each key is of a lease or reservation that lasts."""
        if self._lender is not None:
            assert all(memory.holds(*holder) for holder in self._lender.holders())
