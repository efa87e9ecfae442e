"""Requests at decode's door: prefilled, with their KV landed, and decode too busy to go on.

A step that is too long for one request more is short enough again as soon as another one ends
there: with some thirty in a batch that is well under a second. Mode `lookahead` lets a request
wait so long, and its first token with it, as long as that token is not due: neither a prefill
is wasted nor a time between tokens spoilt. What can't wait any longer goes in, unless it is to
be checked twice.

Here is who stands where and who may go in; what follows from it is `Lifecycle`'s.
"""

from bisect import insort
from collections.abc import Iterator

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillDone
from halfmoon_scheduling.admission import admission_policy
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.request_state import Phase, RequestState

_Rank = tuple[int, int, RequestId]


class LateAdmission:
    """One queue before each decode worker, by priority and then by arrival."""

    def __init__(
        self, config: SchedulingConfig, slos: Slos, decodes: DecodePool, deadlines: Deadlines
    ) -> None:
        """Nobody waits."""
        self._defer_s = config.defer_s
        self._may_wait = config.admission == "lookahead"
        #: Whether decode is looked at again when a prefill is done, and what it says is final.
        self.refuses = admission_policy.refuses_after_prefill(config)
        self._slos = slos
        self._decodes = decodes
        self._deadlines = deadlines
        #: Requests in phase LANDED, by their decode workers. Sorted; no queue is empty.
        self._queues: dict[WorkerId, list[tuple[_Rank, RequestState]]] = {}
        #: Workers with a queue at which something ended, or was reported, or somebody is due.
        self._stirred: set[WorkerId] = set()

    def verdict(self, tracked: RequestState) -> AdmissionVerdict:
        """What decode's load says to a request whose prefill is done; a retry always goes on,
        since its stream has begun."""
        request, decode = tracked.request, tracked.decode
        assert decode is not None
        if tracked.is_retry or not (self._may_wait or self.refuses):
            return admission_policy.ADMITTED
        tbt_slo_s = self._slos.tbt_s(request, decode)
        return admission_policy.decide_after_prefill(
            decode, len(request.token_ids), tbt_slo_s, self._decodes
        )

    def wait(
        self, tracked: RequestState, verdict: AdmissionVerdict, done: PrefillDone, now: float
    ) -> bool:
        """Let a request wait, if it has to and has time; whether it does."""
        decode = tracked.decode
        assert decode is not None
        until_s = self._due_s(tracked, now)
        has_to = bool(verdict.misses) or decode in self._queues
        if not (self._may_wait and has_to and now < until_s) or tracked.is_retry:
            return False
        tracked.phase, tracked.landed = Phase.LANDED, done
        self._deadlines.set(tracked, until_s)
        insort(self._queues.setdefault(decode, []), (tracked.rank, tracked))
        self._stirred.add(decode)
        return True

    def leave(self, tracked: RequestState) -> None:
        """It waits no more, whatever becomes of it."""
        decode = tracked.decode
        assert decode is not None
        queue = self._queues[decode]
        queue.remove((tracked.rank, tracked))
        if not queue:
            del self._queues[decode]
            self._stirred.discard(decode)

    def stir(self, decode: WorkerId) -> None:
        """Something has changed at a worker: somebody may go in."""
        if decode in self._queues:
            self._stirred.add(decode)

    def due(self, tracked: RequestState, now: float) -> None:
        """Its deadline has come: it goes in with the next that do."""
        assert tracked.decode is not None
        self._deadlines.set(tracked, now)
        self.stir(tracked.decode)

    def ready(self, now: float) -> Iterator[tuple[RequestState, PrefillDone]]:
        """Those who may go in, each with what its prefill said. Whoever asks lets one in
        before asking for the next: it counts for that one."""
        stirred, self._stirred = sorted(self._stirred), set()
        for decode in stirred:
            while (queue := self._queues.get(decode)) is not None:
                first = queue[0][1]
                goes_anyway = first.deadline_s <= now and not self.refuses
                if not goes_anyway and self.verdict(first).misses:
                    break
                assert first.landed is not None
                self.leave(first)
                yield first, first.landed

    def _due_s(self, tracked: RequestState, now: float) -> float:
        """When its first token is due, or its pages fall to decode again."""
        assert tracked.placement is not None
        ttft_slo_s = self._slos.ttft_s(tracked.request, tracked.placement.prefill)
        due_s = now + self._defer_s if ttft_slo_s is None else tracked.arrived_s + ttft_slo_s
        return min(due_s, tracked.landing_ends_s)

    def check(self, landed: list[RequestState]) -> None:
        """Audit: exactly these requests wait, each before its own decode worker."""
        for decode, queue in self._queues.items():
            assert queue, "an empty queue is kept"
            assert [rank for rank, _ in queue] == sorted(rank for rank, _ in queue)
            assert all(one.phase is Phase.LANDED and one.decode == decode for _, one in queue)
        waiting = [rank for queue in self._queues.values() for rank, _ in queue]
        assert sorted(waiting) == sorted(one.rank for one in landed)
        assert self._stirred <= self._queues.keys()
