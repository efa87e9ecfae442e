"""Keep waiting requests sorted by priority, then by arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from halfmoon_scheduling.requests.request_state import RequestRank


class RankQueue:
    """Hold the ranks of the requests that wait for one thing."""

    def __init__(self) -> None:
        #: Sorted; each rank once.
        self._ranks: list[RequestRank] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RequestRank]:
        return iter(self._ranks)

    def __contains__(self, rank: RequestRank) -> bool:
        i = bisect_left(self._ranks, rank)
        return i < len(self._ranks) and self._ranks[i] == rank

    @property
    def first(self) -> RequestRank | None:
        """The request that goes first, if any waits."""
        return self._ranks[0] if self._ranks else None

    def add(self, rank: RequestRank) -> None:
        """Add a request that is not in the queue."""
        insort(self._ranks, rank)

    def remove(self, rank: RequestRank) -> None:
        """Remove a request, if it is in the queue."""
        i = bisect_left(self._ranks, rank)
        if i < len(self._ranks) and self._ranks[i] == rank:
            del self._ranks[i]

    def check(self) -> None:
        """Audit: sorted, and each request once."""
        assert all(one < other for one, other in zip(self._ranks, self._ranks[1:], strict=False))
