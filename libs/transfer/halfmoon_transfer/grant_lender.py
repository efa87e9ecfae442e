"""Lend parts of one region: each holder gets a key of its own, until it is taken back.

An owner of pages or blocks keeps one lender. Holders are what its callers hold: a landing, a
lease. Where grants are off, all holders get the region's own key, as peers did before grants.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, Literal, TypeVar

import msgspec

from halfmoon_protocol.regions import KEY_BYTES, Region
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Rejected
from halfmoon_transfer.regions.grant_revocation import OVER, GrantRevocation
from halfmoon_transfer.regions.region_grant import GrantedOps

HolderT = TypeVar("HolderT", bound=Hashable)
GrantChoice = Literal["auto", "on", "off"]

#: Seconds that an access may go on after its key was taken back. An owner's thread lets go of a
#: slice just after it has said that the slice is written: this is to outlast that moment.
_PATIENCE_S = 0.05


class GrantLender(Generic[HolderT]):
    """The keys that one region's owner has lent; for one thread or event loop."""

    def __init__(self, engine: TransferEngine, region: Region, choice: GrantChoice) -> None:
        """Decide whether to lend keys of grants or the region's own.

        Args:
            engine: has registered the region.
            region: the memory to lend parts of.
            choice: "auto" takes grants if no path would be passed over because of them.

        Raises:
            ValueError: "on", but no path of this engine can check accesses to this region.
        """
        can_grant = engine.can_grant(region)
        if choice == "on" and not can_grant:
            raise ValueError(
                "transfer_grants is on, but no path checks accesses to this memory: name tcp in "
                "transfer_backends and keep the KV in memory of the host, or set it to auto"
            )
        #: Whether keys open less than the region.
        self.uses_grants = choice == "on" or (
            choice == "auto" and can_grant and not engine.unchecked_paths
        )
        #: Whether only peers of this host would lose their best path.
        self._turns = choice == "auto" and can_grant and engine.unchecked_paths == {"shm"}
        self._engine = engine
        self._region = region
        #: What each holder has.
        self._lent: dict[HolderT, Region] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __contains__(self, holder: HolderT) -> bool:
        return holder in self._lent

    def holders(self) -> list[HolderT]:
        """Return all that hold keys of grants."""
        return list(self._lent)

    def on_peers(self, *, nearby: bool) -> bool:
        """Use grants from now on if peers reach the region by checked paths anyway; or not.

        What is lent stays as it is.

        Args:
            nearby: whether a peer of this host, which may share memory, is to use the keys.

        Returns:
            Whether this changed anything.
        """
        if not self._turns or self.uses_grants == (not nearby):
            return False
        self.uses_grants = not nearby
        return True

    def lend(
        self, holder: HolderT, ranges: Iterable[tuple[int, int]], op: GrantedOps, ttl_s: float
    ) -> Region:
        """Return the region with a key that opens these ranges alone.

        Args:
            holder: has no key yet.
            ranges: offset and length of each; without any, the key is one that opens nothing.
            op: what the holder may do with them.
            ttl_s: seconds until the key ends by itself; it is to be taken back all the same.

        Raises:
            Rejected: the region is not registered any more.
            Overloaded: there are too many grants.
        """
        if not self.uses_grants:
            return self._region
        assert holder not in self._lent, "a holder gets a second key"
        ranges = list(ranges)
        if not ranges:
            return unkeyed(self._region)
        granted = self._engine.grant(self._region, ranges, op, ttl_s)
        self._lent[holder] = granted
        return granted

    def lent_to(self, holder: HolderT) -> Region:
        """Return the region as a holder names it."""
        return self._lent.get(holder, self._region)

    def extend(self, holder: HolderT, ttl_s: float) -> None:
        """Let a holder's key end so many seconds from now, if it has one of a grant."""
        if (granted := self._lent.get(holder)) is not None:
            self._engine.extend_grant(granted, ttl_s)

    def begin_take_back(self, holder: HolderT) -> GrantRevocation | None:
        """Take a holder's key back at once; its ranges may be lent again when that is over.

        Returns:
            Tells when it is over, see `finish`; None if the holder's key was the region's own.
        """
        granted = self._lent.pop(holder, None)
        if granted is None:
            return None
        try:
            return self._engine.begin_revoke(granted)
        except Rejected:
            return OVER  # the region was unregistered, and its grants with it

    def take_back(self, holder: HolderT) -> bool:
        """Take a holder's key back; its ranges may be lent again after this returns.

        It waits where an access goes on, and cuts its connection after a moment.

        Returns:
            Whether it is certain that the holder accesses nothing any more; False if its key
            was the region's own.
        """
        revocation = self.begin_take_back(holder)
        return revocation is not None and finish(revocation)

    def cut(self) -> None:
        """Cut the connections by which peers reach the region."""
        self._engine.cut_connections()

    def is_quiet(self) -> bool:
        """Return whether no access goes on over a connection that was cut."""
        return self._engine.is_quiet()


def finish(revocation: GrantRevocation) -> bool:
    """Wait for the accesses by a key that was taken back; not in an event loop.

    Returns:
        False if one has not ended, a second after its connection was cut.
    """
    return revocation.finish(_PATIENCE_S)


def unkeyed(region: Region) -> Region:
    """Return a region with a key that opens nothing."""
    return msgspec.structs.replace(region, key=bytes(KEY_BYTES))
