"""Queue prefilled requests before decode workers that are too busy to take one more.

A decode step that is too long for one more request becomes short enough as soon as another request
ends there. With some thirty requests in a batch that takes well under a second. Mode `lookahead`
therefore holds a prefilled request, and its first token, until that token is due: no prefill is
wasted and no time between tokens exceeds its limit. A request that can't wait any longer is
admitted all the same, unless the mode refuses it then.

The queue decides which request is admitted next; `DecodeHandover` acts on it.
"""

from bisect import insort
from collections.abc import Iterator

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillDone
from halfmoon_scheduling.admission import admission_policy
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.request_state import Phase, RequestRank, RequestState


class LateAdmission:
    """Hold one queue before each decode worker, by priority and then by arrival."""

    def __init__(
        self,
        config: SchedulingConfig,
        slos: Slos,
        decodes: DecodePool,
        deadlines: Deadlines,
        bounds: LimitBounds | None,
    ) -> None:
        """Create empty queues."""
        self._bounds = bounds
        self._defer_s = config.defer_s
        self._may_wait = ADMISSION_MODES[config.admission].waits_for_decode
        #: Whether decode's load is checked again after the prefill, and may then refuse.
        self.refuses = admission_policy.refuses_after_prefill(config)
        self._slos = slos
        self._decodes = decodes
        self._deadlines = deadlines
        #: Requests in phase LANDED, by their decode workers. Sorted; no queue is empty.
        self._queues: dict[WorkerId, list[tuple[RequestRank, RequestState]]] = {}
        #: Workers with a queue whose load or queue has changed since `ready`.
        self._changed: set[WorkerId] = set()

    def verdict(self, state: RequestState, now: float) -> AdmissionVerdict:
        """Compare decode's load with the limits of a request whose prefill is done.

        A retry is always admitted, since its stream has begun.
        """
        request, decode = state.request, state.decode
        assert decode is not None
        if state.is_retry or not (self._may_wait or self.refuses):
            return admission_policy.ADMITTED
        if self._bounds is not None and self._decodes.is_idle(decode):
            return admission_policy.ADMITTED  # no wait makes its steps shorter
        tbt_slo_s = self._slos.tbt_s(request, decode)
        return admission_policy.decide_after_prefill(
            decode, len(request.token_ids), tbt_slo_s, self._decodes, now, self._bounds
        )

    def try_wait(
        self, state: RequestState, verdict: AdmissionVerdict, done: PrefillDone, now: float
    ) -> bool:
        """Queue a request if it has to wait and has time to; return whether it waits."""
        decode = state.decode
        assert decode is not None
        until_s = self._wait_ends_s(state, now)
        has_to = bool(verdict.misses) or decode in self._queues
        if not (self._may_wait and has_to and now < until_s) or state.is_retry:
            return False
        state.phase, state.landed, state.landed_until_s = Phase.LANDED, done, until_s
        self._deadlines.set(state, until_s)
        insort(self._queues.setdefault(decode, []), (state.rank, state))
        self._changed.add(decode)
        return True

    def remove(self, state: RequestState) -> None:
        """Remove a request from its queue."""
        decode = state.decode
        assert decode is not None
        queue = self._queues[decode]
        queue.remove((state.rank, state))
        if not queue:
            del self._queues[decode]
            self._changed.discard(decode)

    def notify(self, decode: WorkerId) -> None:
        """Note that a decode worker's load has changed: a request may be admitted there."""
        if decode in self._queues:
            self._changed.add(decode)

    def on_deadline(self, state: RequestState, now: float) -> None:
        """Mark a request as due: it is admitted next, whatever the load."""
        assert state.decode is not None
        self._deadlines.set(state, now)
        self.notify(state.decode)

    def ready(self, now: float) -> Iterator[tuple[RequestState, PrefillDone]]:
        """Take the requests that may start decoding, each with the result of its prefill.

        The caller starts each one before it takes the next, which then counts that load too.
        """
        if not self._changed:
            return
        changed, self._changed = sorted(self._changed), set()
        for decode in changed:
            while (queue := self._queues.get(decode)) is not None:
                first = queue[0][1]
                is_due = first.deadline_s <= now and not self.refuses
                if not is_due and self.verdict(first, now).misses:
                    break
                assert first.landed is not None
                if is_due and self._bounds is not None:
                    self._bounds.on_landed_timeout(now - first.landed_until_s)
                self.remove(first)
                yield first, first.landed

    def _wait_ends_s(self, state: RequestState, now: float) -> float:
        """Return when a first token is due, or decode would free the request's pages.

        Deadlines are acted on at the next tick, so with bounds the time ends that much sooner.
        """
        assert state.placement is not None
        ttft_slo_s = self._slos.ttft_s(state.request, state.placement.chosen.pool_worker)
        due_s = now + self._defer_s if ttft_slo_s is None else state.arrived_s + ttft_slo_s
        if self._bounds is not None and ttft_slo_s is not None:
            due_s -= self._bounds.lateness_s
        return min(due_s, state.landing_ends_s)

    def check(self, landed: list[RequestState]) -> None:
        """Audit: exactly these requests wait, each before its own decode worker."""
        for decode, queue in self._queues.items():
            assert queue, "an empty queue is kept"
            assert [rank for rank, _ in queue] == sorted(rank for rank, _ in queue)
            assert all(one.phase is Phase.LANDED and one.decode == decode for _, one in queue)
        waiting = [rank for queue in self._queues.values() for rank, _ in queue]
        assert sorted(waiting) == sorted(one.rank for one in landed)
        assert self._changed <= self._queues.keys()
