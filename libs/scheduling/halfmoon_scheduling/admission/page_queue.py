"""Requests that wait for decode pages, and when the first of them is worth another try.

Only the first one may be placed, so it alone is watched. A placement that found no decode
worker with room leaves a `PageShortage`: how many pages, and which workers could give them. From
then
on a load report costs a look at the one worker that sent it. A whole new placement is tried
when such a worker has that many pages, when workers join or leave, or when another request
comes to be the first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.cluster.decode_pool import DecodePool

QueueRank = tuple[int, int, RequestId]


@dataclass(frozen=True, slots=True)
class PageShortage:
    """What a request was not placed for."""

    rank: QueueRank
    #: Pages that one worker must have free.
    n_pages: int
    #: Decode workers that could take the request if they had them.
    takers: frozenset[WorkerId]


class PageQueue:
    """Sorted by priority, then by arrival."""

    def __init__(self, decodes: DecodePool) -> None:
        self._decodes = decodes
        self._ranks: list[QueueRank] = []
        #: Of the first request at its last placement; None: it is to be placed again.
        self._lack: PageShortage | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[QueueRank]:
        return iter(self._ranks)

    @property
    def first(self) -> QueueRank | None:
        """The request that goes first, if any waits."""
        return self._ranks[0] if self._ranks else None

    def __contains__(self, rank: QueueRank) -> bool:
        i = bisect_left(self._ranks, rank)
        return i < len(self._ranks) and self._ranks[i] == rank

    def add(self, rank: QueueRank) -> None:
        """Let a request wait; it does not yet."""
        insort(self._ranks, rank)

    def remove(self, rank: QueueRank) -> None:
        """A request waits no more; if it did."""
        if rank in self:
            del self._ranks[bisect_left(self._ranks, rank)]

    def set_shortage(self, lack: PageShortage) -> None:
        """A placement found no room; it is remembered if the request is the first one."""
        if lack.rank == self.first:
            self._lack = lack

    def reconsider(self) -> None:
        """Something has changed besides pages: the first request is to be placed again."""
        self._lack = None

    def may_retry(self) -> bool:
        """Whether placing the first request again may find room; some request waits."""
        lack = self._lack
        if lack is None or lack.rank != self._ranks[0]:
            return True
        return any(
            worker in lack.takers and self._decodes.has_room(worker, lack.n_pages)
            for worker in self._decodes.take_workers_with_more_room()
        )

    def check(self) -> None:
        """Audit: sorted, and each request once."""
        assert all(one < other for one, other in zip(self._ranks, self._ranks[1:], strict=False))
