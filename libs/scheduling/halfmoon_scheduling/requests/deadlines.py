"""Requests by their deadlines: who is due, without looking at all the others.

A heap from which nothing is taken out early: a request that is over, or has another deadline
by now, is recognised when its old one comes up. What is out of date is swept out as soon as
it is more than what is not.
"""

import heapq
import itertools

from halfmoon_scheduling.requests.request_state import RequestState

#: Entries that are kept without a look at how many are out of date.
_FEW = 64
#: Deadline, a number that no other entry has, and the request.
_Entry = tuple[float, int, RequestState]


class Deadlines:
    """The deadlines of requests that are not over."""

    def __init__(self) -> None:
        #: A heap; every request has its present deadline here, unless that is infinite.
        self._entries: list[_Entry] = []
        self._numbers = itertools.count()
        self._n_live = 0

    def set(self, tracked: RequestState, deadline_s: float) -> None:
        """Give a request another deadline; infinity is none."""
        if deadline_s == tracked.deadline_s:
            return
        self._n_live += (deadline_s < float("inf")) - (tracked.deadline_s < float("inf"))
        tracked.deadline_s = deadline_s
        if deadline_s < float("inf"):
            heapq.heappush(self._entries, (deadline_s, next(self._numbers), tracked))
        if len(self._entries) > 2 * self._n_live + _FEW:
            self._entries = [entry for entry in self._entries if _is_present(entry)]
            heapq.heapify(self._entries)

    def pop_due(self, now: float) -> list[RequestState]:
        """Those whose deadline has come, by their arrival; it is set anew or they end."""
        due: dict[int, RequestState] = {}
        while self._entries and self._entries[0][0] <= now:
            entry = heapq.heappop(self._entries)
            if _is_present(entry):
                due[entry[2].sequence] = entry[2]
        for tracked in due.values():
            self._n_live -= 1
            tracked.deadline_s = float("inf")
        return [due[sequence] for sequence in sorted(due)]

    def check(self, requests: list[RequestState]) -> None:
        """Audit: of these requests each that has a deadline is here, and nothing else counts."""
        present = {entry[2].sequence for entry in self._entries if _is_present(entry)}
        assert present == {t.sequence for t in requests if t.deadline_s < float("inf")}
        assert self._n_live == len(present)
        assert len(self._entries) <= 2 * self._n_live + _FEW


def _is_present(entry: _Entry) -> bool:
    return entry[2].deadline_s == entry[0]
