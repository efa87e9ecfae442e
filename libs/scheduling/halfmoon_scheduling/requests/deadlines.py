"""Find the requests whose deadline has passed without a look at all the others.

Nothing is taken out of the heap early. A request that is over, or has another deadline by now, is
recognised when its old entry comes up. Stale entries are swept out as soon as they outnumber the
present ones.
"""

import heapq
import itertools

from halfmoon_scheduling.requests.request_state import RequestState

#: Entries up to which stale ones are not swept out.
_MIN_ENTRIES = 64
#: Deadline, a number that no other entry has, and the request.
_Entry = tuple[float, int, RequestState]


class Deadlines:
    """Hold the deadlines of requests that are not over."""

    def __init__(self) -> None:
        #: A heap; every request has its present deadline here, unless that is infinite.
        self._entries: list[_Entry] = []
        self._numbers = itertools.count()
        #: Requests with a finite deadline.
        self._n_live = 0

    def set(self, state: RequestState, deadline_s: float) -> None:
        """Give a request another deadline; infinity is none."""
        if deadline_s == state.deadline_s:
            return
        self._n_live += (deadline_s < float("inf")) - (state.deadline_s < float("inf"))
        state.deadline_s = deadline_s
        if deadline_s < float("inf"):
            heapq.heappush(self._entries, (deadline_s, next(self._numbers), state))
        if len(self._entries) > 2 * self._n_live + _MIN_ENTRIES:
            self._entries = [entry for entry in self._entries if _is_present(entry)]
            heapq.heapify(self._entries)

    def pop_due(self, now: float) -> list[RequestState]:
        """Remove and return requests past their deadline, in the order of their arrival.

        They have no deadline then: the caller sets another one, or ends the request.
        """
        due: dict[int, RequestState] = {}
        while self._entries and self._entries[0][0] <= now:
            entry = heapq.heappop(self._entries)
            if _is_present(entry):
                due[entry[2].sequence] = entry[2]
        for state in due.values():
            self._n_live -= 1
            state.deadline_s = float("inf")
        return [due[sequence] for sequence in sorted(due)]

    def check(self, requests: list[RequestState]) -> None:
        """Audit: each of these requests that has a deadline is here, and no other counts."""
        present = {entry[2].sequence for entry in self._entries if _is_present(entry)}
        assert present == {s.sequence for s in requests if s.deadline_s < float("inf")}
        assert self._n_live == len(present)
        assert len(self._entries) <= 2 * self._n_live + _MIN_ENTRIES


def _is_present(entry: _Entry) -> bool:
    return entry[2].deadline_s == entry[0]
