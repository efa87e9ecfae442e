"""Leases that wait for blocks on their way from the disk to memory.

Each waits for a prefix, of which some blocks are missing. It is decided when the last of them has
come, or will not come any more, or when its time is over: who decides is told, and makes it a
lease on what is there.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, Ticket

LeaseKey = tuple[str, Ticket]


@dataclass(slots=True)
class WaitingLease:
    """One lease that waits."""

    prefix: list[BlockHash]
    #: Those of `prefix` that are not in memory yet.
    missing: set[BlockHash]
    deadline_s: float
    #: Those that were missing and have come.
    came: set[BlockHash] = field(default_factory=set)


class WaitingLeases:
    """All of them, by owner and ticket."""

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
        """Wait for the missing blocks of a prefix until then; whether there is anything to."""
        waiting = WaitingLease(list(prefix), {*missing} & {*prefix}, until_s)
        self._waiting[key] = waiting
        return bool(waiting.missing)

    def take(self, key: LeaseKey) -> WaitingLease | None:
        """End the waiting of one: what it is left with; None if it did not wait."""
        return self._waiting.pop(key, None)

    def forget_owner(self, owner: str) -> None:
        """A client is gone."""
        for key in [key for key in self._waiting if key[0] == owner]:
            del self._waiting[key]

    def arrived(self, block: BlockHash) -> list[tuple[LeaseKey, bool]]:
        """A block is in memory: who waited for it, and whether for nothing more."""
        found: list[tuple[LeaseKey, bool]] = []
        for key, waiting in self._waiting.items():
            if block in waiting.missing:
                waiting.missing.remove(block)
                waiting.came.add(block)
                found.append((key, not waiting.missing))
        return found

    def on_unavailable(self, block: BlockHash) -> list[LeaseKey]:
        """Whoever waits for a block waits for those before it only; who has all these."""
        complete: list[LeaseKey] = []
        for key, waiting in self._waiting.items():
            if block in waiting.missing:
                waiting.prefix = waiting.prefix[: waiting.prefix.index(block)]
                waiting.missing &= {*waiting.prefix}
                if not waiting.missing:
                    complete.append(key)
        return complete

    def overdue(self, now: float) -> list[LeaseKey]:
        """Those whose time is over."""
        return [key for key, waiting in self._waiting.items() if waiting.deadline_s <= now]

    def all(self) -> Iterator[WaitingLease]:
        """For audits."""
        yield from self._waiting.values()
