"""The requests that are not over: what each holds, where it goes next, how it ends.

`Conductor` says what happened; here a request is placed, waits, is given up, or ends, with
all that it holds. Rules:

- A request ends once: by one `Reject`, `Fail` or `Resubmit` from here, by a final `Deliver`,
  or because the client or decode is done with it.
- Nothing is sent to a worker that is not here (`send` sees to it).
- What a request holds is in `Cluster`'s books until `_release` takes it out.
- Retries (attempt 2 and on) are never rejected: their stream has begun, so they wait or fail.
"""

from bisect import insort
from collections import Counter, deque

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import AnyMessage, Cancel, ReserveDecode
from halfmoon_scheduling import admission
from halfmoon_scheduling.cluster import Cluster
from halfmoon_scheduling.commands import AnyCommand, Fail, Reject, Resubmit, Send
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.limits import TooLong
from halfmoon_scheduling.placement import Job, Placement
from halfmoon_scheduling.placer import Placer
from halfmoon_scheduling.request_state import Decision, Phase, Stopping, Tracked

#: Seconds after which a refused client may try again when nothing better is known.
RETRY_S = 1.0


class Lifecycle:
    """All requests that are not over."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster, placer: Placer) -> None:
        self._config = config
        self._cluster = cluster
        self._placer = placer
        #: Recent placements with their tables, the newest last.
        self.decisions: deque[Decision] = deque(maxlen=config.kept_decisions)
        #: In the order of arrival.
        self._requests: dict[RequestId, Tracked] = {}
        #: (sequence, id) of those in phase WAITING, sorted.
        self._waiting: list[tuple[int, RequestId]] = []
        #: Disjoint from `_requests`.
        self._stopping: dict[RequestId, Stopping] = {}
        self._n_arrived = 0
        #: Set when something may have made room for those who wait; whoever serves them
        #: clears it.
        self.room_made = False

    # -- looking -----------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Requests by phase, and under "stopping" those over that a prefill may still write."""
        counts = Counter(tracked.phase for tracked in self._requests.values())
        return {phase.value: counts[phase] for phase in Phase} | {"stopping": len(self._stopping)}

    def get(self, request_id: RequestId) -> Tracked | None:
        """A request that is not over."""
        return self._requests.get(request_id)

    def all(self) -> list[Tracked]:
        """All of them in the order of their arrival; a copy, so that they may end meanwhile."""
        return list(self._requests.values())

    def stopping(self, request_id: RequestId) -> Stopping | None:
        """A request that is over, while its prefill may still write."""
        return self._stopping.get(request_id)

    def send(self, worker_id: WorkerId, message: AnyMessage) -> list[AnyCommand]:
        """The command to send, or none when the worker is not here."""
        return [Send(worker_id, message)] if worker_id in self._cluster else []

    # -- on the way in -----------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> list[AnyCommand]:
        """Take a request in; one that is here already is not taken again."""
        if request.request_id in self._requests or request.request_id in self._stopping:
            return []
        self._n_arrived += 1
        tracked = Tracked(request, self._n_arrived, arrived_s=now, deadline_s=now)
        self._requests[request.request_id] = tracked
        # Nobody overtakes those who wait, or a long prompt would wait for ever.
        return self._seek(tracked, now, may_reserve=not self._waiting)

    def place_waiting(self, now: float) -> list[AnyCommand]:
        """Serve those who wait, first come first served, until one has to go on waiting."""
        self.room_made = False
        commands: list[AnyCommand] = []
        while self._waiting:
            _, request_id = self._waiting[0]
            commands += self._seek(self._requests[request_id], now, may_reserve=True)
            if self._waiting and self._waiting[0][1] == request_id:
                break
        return commands

    def try_elsewhere(
        self, tracked: Tracked, decode: WorkerId, full_until_s: float, now: float
    ) -> list[AnyCommand]:
        """`decode` has no room: another one, or wait."""
        self._release(tracked, now)
        self._cluster.refused(decode, full_until_s)
        tracked.refused_by.add(decode)
        return self._seek(tracked, now, may_reserve=True)

    def _on_silence(self, tracked: Tracked, decode: WorkerId, now: float) -> list[AnyCommand]:
        """`decode` does not answer: another one, or another try with another id."""
        tracked.silent.add(decode)
        full_until_s = now + self._config.reserve_timeout_s
        commands = self.send(decode, Cancel(request_id=tracked.request_id))
        return commands + self.try_elsewhere(tracked, decode, full_until_s, now)

    def _seek(self, tracked: Tracked, now: float, *, may_reserve: bool) -> list[AnyCommand]:
        """Reserve, wait, or end: for a request that holds nothing."""
        request = tracked.request
        for role in ("prefill", "decode"):
            if not self._cluster.accepting(role):
                reason = f"no {role} worker is live that takes requests"
                return self.refuse(
                    tracked, Reject(request.request_id, "unavailable", reason, RETRY_S)
                )
        decodes = {info.worker_id for info in self._cluster.accepting("decode")}
        if decodes <= tracked.silent:
            return self.again(tracked, f"no answer from {', '.join(sorted(decodes))}", now)
        try:
            not_to_ask = tracked.refused_by | tracked.silent
            placement, job = self._placer.place(request, not_to_ask, now)
        except TooLong as error:
            return self.refuse(tracked, Reject(request.request_id, "too_long", str(error)))
        if not tracked.is_retry:
            refused = admission.decide(
                self._config.admission,
                placement,
                ttft_slo_s=self._ttft_slo_s(request),
                tbt_slo_s=_first(request.tbt_slo_s, self._config.tbt_slo_s),
                waited_s=now - tracked.arrived_s,
            )
            if refused is not None:
                return self.overloaded(tracked, refused.reason, refused.retry_after_s)
        if placement.decode is None or not may_reserve:
            return self._wait(tracked)
        return self._reserve(tracked, placement, placement.decode, job, now)

    def _wait(self, tracked: Tracked) -> list[AnyCommand]:
        tracked.phase = Phase.WAITING
        tracked.placement = None
        tracked.deadline_s = tracked.arrived_s + self._patience_s(tracked)
        tracked.refused_by.clear()
        entry = (tracked.sequence, tracked.request_id)
        if entry in self._waiting:
            return []
        # Retries are not turned away: they are no more than the workers held.
        if len(self._waiting) >= self._config.max_waiting and not tracked.is_retry:
            reason = f"{len(self._waiting)} requests wait for decode pages, which is the limit"
            return self.overloaded(tracked, reason)
        insort(self._waiting, entry)
        return []

    def _reserve(
        self, tracked: Tracked, placement: Placement, decode: WorkerId, job: Job, now: float
    ) -> list[AnyCommand]:
        self._stop_waiting(tracked)
        request = tracked.request
        self._cluster.plan(placement.chosen, decode, job, now)
        tracked.phase = Phase.RESERVING
        tracked.placement = placement
        tracked.asked_s = now
        tracked.deadline_s = now + self._config.reserve_timeout_s
        self.decisions.append(Decision(request.request_id, request.attempt, now, placement))
        message = ReserveDecode(
            request_id=request.request_id, n_tokens=job.n_tokens, stopping=request.stopping
        )
        return self.send(decode, message)

    # -- on the way out ----------------------------------------------------------------------

    def give_up(self, tracked: Tracked, now: float, *, because: str = "") -> list[AnyCommand]:
        """Cancel what a request holds on live workers, and end it; try again if `because`."""
        request_id, prefill, decode = tracked.request_id, tracked.prefill, tracked.decode
        prefilling = tracked.phase is Phase.PREFILLING
        commands: list[AnyCommand] = []
        keep_landing = False
        if prefilling and prefill is not None and prefill in self._cluster:
            assert decode is not None
            commands += self.send(prefill, Cancel(request_id=request_id))
            keep_landing = decode in self._cluster
            if keep_landing:
                deadline_s = now + self._config.reserve_timeout_s
                self._stopping[request_id] = Stopping(prefill, decode, deadline_s)
        elif tracked.phase is not Phase.WAITING:
            assert decode is not None
            cancel = Cancel(request_id=request_id, landing_in_doubt=prefilling)
            commands += self.send(decode, cancel)
        if because:
            return commands + self.again(tracked, because, now, keep_landing=keep_landing)
        self.end(tracked, now, keep_landing=keep_landing)
        self._placer.forget(request_id)
        return commands

    def again(
        self,
        tracked: Tracked,
        reason: str,
        now: float,
        *,
        retryable: bool = True,
        keep_landing: bool = False,
    ) -> list[AnyCommand]:
        """End this try, whose workers know; another one follows if it may help and is allowed."""
        self.end(tracked, now, keep_landing=keep_landing)
        # A try that came to decoding has delivered a token: it is progress, however often
        # the request is preempted.
        decoding = tracked.phase is Phase.DECODING
        fruitless = 0 if decoding else tracked.request.fruitless + 1
        if retryable and fruitless < self._config.max_attempts:
            return [Resubmit(tracked.request_id, reason)]
        self._placer.forget(tracked.request_id)
        if retryable:
            reason = f"{reason} ({fruitless} tries in a row brought no token)"
        return [Fail(tracked.request_id, reason)]

    def refuse(self, tracked: Tracked, reject: Reject) -> list[AnyCommand]:
        """End a request that holds nothing; a retry, whose stream has begun, fails instead."""
        self._stop_waiting(tracked)
        del self._requests[tracked.request_id]
        self._placer.forget(tracked.request_id)
        return [Fail(tracked.request_id, reject.reason) if tracked.is_retry else reject]

    def overloaded(
        self, tracked: Tracked, reason: str, retry_after_s: float = RETRY_S
    ) -> list[AnyCommand]:
        """Refuse a request that holds nothing, for lack of room."""
        return self.refuse(tracked, Reject(tracked.request_id, "overloaded", reason, retry_after_s))

    def refuse_for_ever(self, tracked: Tracked, reason: str, now: float) -> list[AnyCommand]:
        """Its decode worker says that it never has room for it: nothing is held there."""
        self._release(tracked, now)
        return self.refuse(tracked, Reject(tracked.request_id, "too_long", reason))

    def end(self, tracked: Tracked, now: float, *, keep_landing: bool = False) -> None:
        """The request is over; with `keep_landing` a `Stopping` has its landing now."""
        self._stop_waiting(tracked)
        self._release(tracked, now, keep_landing=keep_landing)
        del self._requests[tracked.request_id]
        self.room_made = True

    # -- landings of requests that are over --------------------------------------------------

    def free_landing(self, request_id: RequestId, *, in_doubt: bool) -> list[AnyCommand]:
        """Prefill writes no more, or can't be asked: decode may let go."""
        decode = self._stopping[request_id].decode
        self.forget_landing(request_id)
        return self.send(decode, Cancel(request_id=request_id, landing_in_doubt=in_doubt))

    def forget_landing(self, request_id: RequestId) -> None:
        """Decode has let go by itself."""
        stopping = self._stopping.pop(request_id)
        self._cluster.release_decode(stopping.decode, request_id)
        self.room_made = True

    # -- many at once ------------------------------------------------------------------------

    def worker_lost(self, worker_id: WorkerId, reason: str, now: float) -> list[AnyCommand]:
        """A worker has left the cluster: what was on it is tried again elsewhere."""
        commands: list[AnyCommand] = []
        for request_id, stopping in list(self._stopping.items()):
            if worker_id == stopping.decode:
                self.forget_landing(request_id)
            elif worker_id == stopping.prefill:
                commands += self.free_landing(request_id, in_doubt=True)
        for tracked in self.all():
            on_prefill = tracked.prefill == worker_id and tracked.phase is not Phase.DECODING
            if on_prefill or tracked.decode == worker_id:
                commands += self.give_up(tracked, now, because=f"{worker_id} is lost: {reason}")
        # Nobody may be left who could serve those who wait: they are to hear it.
        self.room_made = True
        return commands

    def time_passed(self, now: float) -> list[AnyCommand]:
        """Act on the deadlines that are over."""
        commands: list[AnyCommand] = []
        for tracked in self.all():
            if tracked.deadline_s <= now:
                commands += self._on_deadline(tracked, now)
        for request_id, stopping in list(self._stopping.items()):
            if stopping.deadline_s <= now:
                commands += self.free_landing(request_id, in_doubt=True)
        self.room_made = True
        return commands

    def _on_deadline(self, tracked: Tracked, now: float) -> list[AnyCommand]:
        if tracked.phase is Phase.WAITING:
            waited_s = now - tracked.arrived_s
            return self.overloaded(tracked, f"no decode pages came free in {waited_s:.3g} s")
        decode = tracked.decode
        assert decode is not None, "it is reserving or prefilling"
        if tracked.phase is Phase.RESERVING:
            return self._on_silence(tracked, decode, now)
        timeout_s = self._config.request_timeout_s
        because = f"{tracked.prefill} did not finish in {timeout_s:.3g} s"
        return self.give_up(tracked, now, because=because)

    # -- inside ------------------------------------------------------------------------------

    def _release(self, tracked: Tracked, now: float, *, keep_landing: bool = False) -> None:
        """Take a request's claims out of the books."""
        if tracked.prefill is not None:
            self._cluster.release_prefill(tracked.prefill, tracked.request_id, now)
        if tracked.decode is not None and not keep_landing:
            self._cluster.release_decode(tracked.decode, tracked.request_id)

    def _stop_waiting(self, tracked: Tracked) -> None:
        entry = (tracked.sequence, tracked.request_id)
        if tracked.phase is Phase.WAITING and entry in self._waiting:
            self._waiting.remove(entry)

    def _ttft_slo_s(self, request: Request) -> float | None:
        return _first(request.ttft_slo_s, self._config.ttft_slo_s)

    def _patience_s(self, tracked: Tracked) -> float:
        """How long it may wait for pages, from its arrival."""
        slo_s = self._ttft_slo_s(tracked.request)
        if self._config.admission == "none" or tracked.is_retry or slo_s is None:
            return self._config.request_timeout_s
        return min(slo_s, self._config.request_timeout_s)

    def check(self) -> None:
        """Audit: phases, the queue and the cluster's books tell one story, of live workers."""
        assert self._waiting == sorted(self._waiting)
        waiting = {t.request_id for t in self._requests.values() if t.phase is Phase.WAITING}
        assert {request_id for _, request_id in self._waiting} == waiting
        assert len(self._waiting) == len(waiting), "a request waits twice"
        assert not self._requests.keys() & self._stopping.keys()
        planned: dict[WorkerId, set[RequestId]] = {}
        held: dict[WorkerId, set[RequestId]] = {}
        for request_id, tracked in self._requests.items():
            if tracked.phase is Phase.WAITING:
                assert tracked.placement is None
                continue
            assert tracked.prefill is not None and tracked.decode is not None
            held.setdefault(tracked.decode, set()).add(request_id)
            if tracked.phase is not Phase.DECODING:
                planned.setdefault(tracked.prefill, set()).add(request_id)
        for request_id, stopping in self._stopping.items():
            assert stopping.prefill in self._cluster
            held.setdefault(stopping.decode, set()).add(request_id)
        for info in self._cluster.workers():
            if info.role == "prefill":
                assert self._cluster.planned_requests(info.worker_id) == planned.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s queue"
            elif info.role == "decode":
                assert self._cluster.held_requests(info.worker_id) == held.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s claims"
        assert not planned and not held, "a request is on a worker that is not here"


def _first(own: float | None, default: float | None) -> float | None:
    return default if own is None else own
