"""Share decode between tenants: a request of the one with more there makes room for the other.

Queues are shared by `fair_queueing`, but a request keeps its pages from the start of its prefill
until its answer ends. So the newest request of the tenant with the most at decode is stopped for a
request that finds no room. It is tried again when there is some, from the tokens that it has: its
client sees a pause, or waits longer for its first token.

- The request is the first that waits, and its tenant has used less than its share of the queue. So
  the one that made room, whose work was counted already, waits behind it.
- The other tenant has at least two requests more. So it has no fewer afterwards, and no two
  tenants stop each other's answers in turn.
- One request at a time is stopped at a worker, until its prefill writes no more and the worker has
  reported twice: the first report may be older than the cancellation.
"""

from collections.abc import Container

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.admission.page_queue import PageShortage
from halfmoon_scheduling.requests.request_state import Phase, RequestState

#: Phases in which a request holds pages.
_HOLDING = (Phase.PREFILLING, Phase.LANDED, Phase.DECODING)
#: Reports of a worker until another request is stopped there.
_REPORTS = 2


class DecodeShares:
    """Know the requests of each tenant at decode workers, and choose which one makes room."""

    def __init__(self) -> None:
        #: Of each tenant with any, in the order of their placements.
        self._placed: dict[str, dict[RequestId, RequestState]] = {}
        #: Reports to wait for, of workers where a request was stopped.
        self._stopped: dict[WorkerId, int] = {}
        #: Requests that were stopped so far.
        self.n_stopped = 0

    def enter(self, state: RequestState) -> None:
        """Count a request that is placed."""
        self._placed.setdefault(state.request.tenant, {})[state.request_id] = state

    def leave(self, state: RequestState) -> None:
        """Count a request no more, if it is counted."""
        tenant = state.request.tenant
        placed = self._placed.get(tenant, {})
        if placed.pop(state.request_id, None) is not None and not placed:
            del self._placed[tenant]

    def on_load(self, worker_id: WorkerId) -> None:
        """Note a report of a decode worker."""
        left = self._stopped.pop(worker_id, 0) - 1
        if left > 0:
            self._stopped[worker_id] = left

    def on_lost(self, worker_id: WorkerId) -> None:
        """Forget a worker."""
        self._stopped.pop(worker_id, None)

    def choose(
        self, first: RequestState, shortage: PageShortage, freeing: Container[WorkerId]
    ) -> RequestState | None:
        """Return the request that is to make room; None: none is.

        Args:
            first: the request that waits for pages, which has used less than its tenant's share.
            shortage: what it lacks.
            freeing: workers where pages come free when a prefill has stopped.
        """
        tenant = first.request.tenant
        if self._placed.keys() <= {tenant}:
            return None
        workers = {w for w in shortage.takers - self._stopped.keys() if w not in freeing}
        n_own = len(self._placed.get(tenant, ()))
        by_count = sorted(self._placed.items(), key=lambda item: (-len(item[1]), item[0]))
        for _, placed in by_count:
            if len(placed) < n_own + 2:
                break
            for state in reversed(placed.values()):
                if state.decode in workers and _may_stop(state, first):
                    return state
        return None

    def on_stopped(self, worker_id: WorkerId) -> None:
        """Note that a request was stopped at a worker."""
        self._stopped[worker_id] = _REPORTS
        self.n_stopped += 1

    def check(self, placed: list[RequestState]) -> None:
        """Audit: exactly the placed requests are counted."""
        counted = {name for each in self._placed.values() for name in each}
        assert counted == {state.request_id for state in placed}
        assert all(self._placed.values())


def _may_stop(state: RequestState, first: RequestState) -> bool:
    """Return whether a request may be stopped for one that waits.

    A suspect goes on: where it is tried is decided by its quarantine.
    """
    is_no_higher = state.request.priority <= first.request.priority
    return state.phase in _HOLDING and is_no_higher and not state.is_suspect
