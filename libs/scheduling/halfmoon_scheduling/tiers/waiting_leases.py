"""Track leases that wait for blocks on their way from the disk to memory.

Each lease waits for a prefix, of which some blocks are missing. The wait ends when the last of
them has arrived or is known to be unavailable, or at the deadline. The caller then grants the
lease on the blocks that are in memory.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, Ticket

LeaseKey = tuple[str, Ticket]


@dataclass(slots=True)
class WaitingLease:
    """A lease that waits."""

    prefix: list[BlockHash]
    #: Blocks of `prefix` that are not in memory yet.
    missing: set[BlockHash]
    deadline_s: float
    #: Blocks of `prefix` that were missing and have arrived.
    arrived: set[BlockHash] = field(default_factory=set)


class WaitingLeases:
    """All waiting leases, by owner and ticket."""

    def __init__(self) -> None:
        self._waiting: dict[LeaseKey, WaitingLease] = {}

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._waiting

    def add(
        self,
        key: LeaseKey,
        prefix: Sequence[BlockHash],
        missing: Collection[BlockHash],
        until_s: float,
    ) -> bool:
        """Wait for the missing blocks of a prefix; return False if there are none."""
        waiting = WaitingLease(list(prefix), {*missing} & {*prefix}, until_s)
        self._waiting[key] = waiting
        return bool(waiting.missing)

    def take(self, key: LeaseKey) -> WaitingLease | None:
        """Remove and return a waiting lease; None if it did not wait."""
        return self._waiting.pop(key, None)

    def forget_owner(self, owner: str) -> None:
        """Remove all waiting leases of a client."""
        for key in [key for key in self._waiting if key[0] == owner]:
            del self._waiting[key]

    def on_arrived(self, block: BlockHash) -> list[tuple[LeaseKey, bool]]:
        """Record a block's arrival; return the leases that waited, and whether complete now."""
        found: list[tuple[LeaseKey, bool]] = []
        for key, waiting in self._waiting.items():
            if block in waiting.missing:
                waiting.missing.remove(block)
                waiting.arrived.add(block)
                found.append((key, not waiting.missing))
        return found

    def on_unavailable(self, block: BlockHash) -> list[LeaseKey]:
        """Cut prefixes before a block that will not arrive; return the leases complete by that."""
        complete: list[LeaseKey] = []
        for key, waiting in self._waiting.items():
            if block in waiting.missing:
                waiting.prefix = waiting.prefix[: waiting.prefix.index(block)]
                waiting.missing &= {*waiting.prefix}
                if not waiting.missing:
                    complete.append(key)
        return complete

    def overdue(self, now: float) -> list[LeaseKey]:
        """Return the leases past their deadline, in the order in which they began to wait."""
        return [key for key, waiting in self._waiting.items() if waiting.deadline_s <= now]

    def all(self) -> Iterator[WaitingLease]:
        """Yield all waiting leases, for `check`."""
        yield from self._waiting.values()
