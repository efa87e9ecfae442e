"""Requests under which a worker was lost or hung: each is tried apart from the others.

When a worker dies, every request that it computed may have done it, and all but one did not.
Tried again together they would take down the next worker together, and the guilty one could
not be told from the others. So a worker has at most one of them at a time, from the
reservation on, until the request has shown that it is harmless: at the prefill worker when its
prefill is done, at the decode worker when decode has produced a token of it. The others wait
in a line of their own, which holds up no other request.

Which workers were lost under a request comes with it (`Request.casualties`); nothing is remembered
here of requests that are over.
"""

from collections.abc import Iterable

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.requests.request_state import RequestState


class Quarantine:
    """Which workers try a suspect, and which suspects wait."""

    def __init__(self) -> None:
        #: By worker, the suspect that it tries.
        self._trials: dict[WorkerId, RequestId] = {}
        #: Suspects in phase QUARANTINED, in the order in which they came to wait.
        self._line: dict[RequestId, RequestState] = {}
        #: Whether a worker came free since the line was looked at.
        self._eased = False

    @property
    def first(self) -> RequestState | None:
        """The suspect that has waited longest, if any waits."""
        return next(iter(self._line.values()), None)

    @property
    def busy(self) -> frozenset[WorkerId]:
        """Workers that try a suspect now."""
        return frozenset(self._trials)

    def wait(self, tracked: RequestState) -> None:
        """Let a suspect wait; one that waits already keeps its place."""
        self._line.setdefault(tracked.request_id, tracked)

    def leave_line(self, tracked: RequestState) -> None:
        """It waits no more; if it did."""
        self._line.pop(tracked.request_id, None)

    def begin(self, tracked: RequestState) -> None:
        """Its workers try it from now on; none of them tries another one."""
        assert tracked.decode is not None
        for worker in (*tracked.writers, tracked.decode):
            assert worker not in self._trials, f"{worker} tries two suspects"
            self._trials[worker] = tracked.request_id

    def on_harmless(self, tracked: RequestState, workers: Iterable[WorkerId]) -> None:
        """It has done no harm at these workers; some of them may not have tried it."""
        for worker in workers:
            if self._trials.get(worker) == tracked.request_id:
                del self._trials[worker]
                self._eased = True

    def request_retry(self) -> None:
        """Other workers may be there: the line is to be looked at."""
        self._eased = True

    def take_retry_request(self) -> bool:
        """Whether a worker came free since this was asked last."""
        eased, self._eased = self._eased, False
        return eased

    def over(self, tracked: RequestState) -> None:
        """Its trial is over, however it went; if there was one."""
        if tracked.decode is not None:
            self.on_harmless(tracked, (*tracked.writers, tracked.decode))

    def check(self, tracked: Iterable[RequestState], waiting: set[RequestId]) -> None:
        """Audit: trials are of live requests at their workers, and the line is of these."""
        assert self._line.keys() == waiting
        places = {t.request_id: (*t.writers, t.decode) for t in tracked if t.decode is not None}
        for worker, request_id in self._trials.items():
            assert worker in places.get(request_id, ()), f"{worker} tries none of its requests"
