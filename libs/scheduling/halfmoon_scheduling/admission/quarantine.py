"""Separate suspects: requests that a worker computed when it was lost or hung.

Each request that a lost worker computed may have caused the loss, and all but one did not. Retried
on one worker, they would take it down together, and the harmful one could not be told from the
others. So a worker has at most one suspect at a time, from the reservation until the request has
proved harmless. That is shown at the prefill worker when its prefill is done, and at the decode
worker when decode has produced a token of it. Other suspects wait in a queue of their own, which
delays no other request.

A request carries the workers that were lost while they computed it (`Request.casualties`). The
quarantine keeps nothing about requests that are over.
"""

from collections.abc import Iterable

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.requests.request_state import RequestState


class Quarantine:
    """Track which workers have a suspect, and which suspects wait."""

    def __init__(self) -> None:
        #: Workers that take nothing but their suspect.
        self.workers_kept_alone: frozenset[WorkerId] = frozenset()
        #: The suspect at each worker that has one.
        self._trials: dict[WorkerId, RequestId] = {}
        #: Suspects in phase QUARANTINED, in the order in which they began to wait.
        self._queue: dict[RequestId, RequestState] = {}
        #: Whether a worker has become free since `take_retry_request`.
        self._retry_requested = False

    @property
    def waiting(self) -> list[RequestState]:
        """The suspects that wait, the one that has waited longest first."""
        return list(self._queue.values())

    @property
    def busy_workers(self) -> frozenset[WorkerId]:
        """Workers that have a suspect now."""
        return frozenset(self._trials)

    def wait(self, state: RequestState) -> None:
        """Queue a suspect; one that is in the queue keeps its position."""
        self._queue.setdefault(state.request_id, state)

    def remove(self, state: RequestState) -> None:
        """Remove a suspect from the queue, if it is there."""
        self._queue.pop(state.request_id, None)

    def begin(self, state: RequestState) -> None:
        """Note that a suspect is at its workers, none of which has another one."""
        assert state.decode is not None
        workers = (*state.writers, state.decode)
        for worker in workers:
            assert worker not in self._trials, f"{worker} has two suspects"
            self._trials[worker] = state.request_id
        if state.is_alone:
            self.workers_kept_alone |= frozenset(workers)

    def on_harmless(self, state: RequestState, workers: Iterable[WorkerId]) -> None:
        """Free those of `workers` that have this suspect: it has done them no harm."""
        for worker in workers:
            if self._trials.get(worker) == state.request_id:
                del self._trials[worker]
                self.workers_kept_alone -= {worker}
                self._retry_requested = True

    def request_retry(self) -> None:
        """Have the queue tried again, since other workers may be there."""
        self._retry_requested = True

    def take_retry_request(self) -> bool:
        """Return whether a worker has become free since the last call."""
        requested, self._retry_requested = self._retry_requested, False
        return requested

    def end(self, state: RequestState) -> None:
        """Free the workers that have this suspect, whatever came of it."""
        if state.decode is not None:
            self.on_harmless(state, (*state.writers, state.decode))

    def check(self, requests: Iterable[RequestState], waiting: set[RequestId]) -> None:
        """Audit: suspects are live requests at their workers, and exactly `waiting` are queued."""
        assert self._queue.keys() == waiting
        assert self.workers_kept_alone <= self._trials.keys()
        places = {s.request_id: (*s.writers, s.decode) for s in requests if s.decode is not None}
        for worker, request_id in self._trials.items():
            assert worker in places.get(request_id, ()), f"{worker} has none of its requests"
