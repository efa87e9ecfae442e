"""The requests that are not over: what each holds, where it goes next, how it ends.

`Conductor` says what happened; here a request is placed, waits, is given up, or ends, with
all that it holds. Rules:

- A request ends once: by one `Reject`, `Fail` or `Resubmit` from here, by a final `Deliver`,
  or because the client or decode is done with it.
- Nothing is sent to a worker that is not here (`send` sees to it).
- What a request holds is in `Cluster`'s books until `_release` takes it out.
- Retries (attempt 2 and on) are never rejected: their stream has begun, so they wait or fail.
- Nobody overtakes those who wait with the same priority, or a long prompt would wait for ever.
  Those held back by admission may be overtaken: what is short may fit where they don't.
"""

from bisect import bisect_left, insort
from collections import Counter, deque

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    PrefillDone,
    ReserveDecode,
    ToWorker,
    WorkerInfo,
)
from halfmoon_scheduling.admission import admission_policy
from halfmoon_scheduling.admission.admission_policy import AdmissionCase, AdmissionVerdict
from halfmoon_scheduling.admission.late_admission import LateAdmission
from halfmoon_scheduling.admission.page_queue import PageQueue, PageShortage, QueueRank
from halfmoon_scheduling.admission.quarantine import Quarantine
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.commands import AnyCommand, Fail, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.prediction_error import PredictionErrors
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory.replication import Replicator
from halfmoon_scheduling.events import Casualty, Request
from halfmoon_scheduling.placement.placement_policy import Placement, PlacementRequest
from halfmoon_scheduling.placement.worker_limits import NoWorkerFits
from halfmoon_scheduling.prediction.decode_forecast import DecodeStay
from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.orphaned_landings import OrphanedLanding, OrphanedLandings
from halfmoon_scheduling.requests.request_state import (
    PREFILLED,
    UNPLACED,
    Decision,
    DecisionOutcome,
    Phase,
    RequestState,
)

#: Seconds after which a refused client may try again when nothing better is known.
RETRY_S = 1.0
#: Requests held back that are looked at in vain at the most, each time one is let in.
MAX_FAILED_RETRIES = 4


class RequestLifecycle:
    """All requests that are not over."""

    def __init__(
        self,
        config: SchedulingConfig,
        cluster: Cluster,
        placer: Placer,
        replicator: Replicator | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._placer = placer
        self._replicator = replicator
        self._slos = Slos(config, cluster)
        #: Recent placements with their tables, the newest last.
        self.decisions: deque[Decision] = deque(maxlen=config.kept_decisions)
        #: In the order of arrival.
        self._requests: dict[RequestId, RequestState] = {}
        #: Exactly those in phase WAITING.
        self._waiting = PageQueue(cluster.decodes)
        #: Ranks of those in phase DEFERRED, sorted.
        self._deferred: list[QueueRank] = []
        #: Those under which workers were lost, and that have not proved harmless since.
        self._quarantine = Quarantine()
        #: Disjoint from `_requests`.
        self._stopping = OrphanedLandings(cluster)
        self._n_arrived = 0
        #: What to do at them depends on the phase.
        self.deadlines = Deadlines()
        #: Those in phase LANDED.
        self.late_admission = LateAdmission(config, self._slos, cluster.decodes, self.deadlines)
        #: How requests ended that were not served: by the limit missed, or by what was lacking.
        self.refusals: Counter[str] = Counter()
        #: How true predictions came.
        self.prediction_errors = PredictionErrors()
        #: When deadlines were looked at last.
        self._ticked_s = 0.0
        #: Set when something may have made room at a decode worker's door; the conductor
        #: clears it when it has looked there.
        self.room_may_have_grown = False

    # -- looking -----------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Requests by phase, and under "stopping" those over that a prefill may still write."""
        counts = Counter(tracked.phase for tracked in self._requests.values())
        return {phase.value: counts[phase] for phase in Phase} | {"stopping": len(self._stopping)}

    def get(self, request_id: RequestId) -> RequestState | None:
        """A request that is not over."""
        return self._requests.get(request_id)

    def all(self) -> list[RequestState]:
        """All of them in the order of their arrival; a copy, so that they may end meanwhile."""
        return list(self._requests.values())

    def stopping(self, request_id: RequestId) -> OrphanedLanding | None:
        """A request that is over, while its prefill may still write."""
        return self._stopping.get(request_id)

    def send(self, worker_id: WorkerId, message: ToWorker) -> list[AnyCommand]:
        """The command to send, or none when the worker is not here."""
        return [Send(worker_id, message)] if worker_id in self._cluster else []

    # -- on the way in -----------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> list[AnyCommand]:
        """Take a request in; one that is here already is not taken again."""
        if request.request_id in self._requests or request.request_id in self._stopping:
            return []
        self._n_arrived += 1
        tracked = RequestState(request, self._n_arrived, arrived_s=now)
        self._requests[request.request_id] = tracked
        if len(request.casualties) >= self._config.max_casualties:
            return self._refuse_harmful(tracked)
        self._cluster.decodes.on_tick(now)
        commands: list[AnyCommand] = []
        if self._deferred and self._deferred[0] < tracked.rank:
            commands += self._place_deferred(now, max_vain=1)
        may_reserve = self._goes_before_all(tracked.rank)
        return commands + self._try_place(tracked, now, may_reserve=may_reserve)

    def place_waiting(self, now: float) -> list[AnyCommand]:
        """Place requests that wait for pages, in their order, until one has to go on waiting;
        and then suspects that can be kept apart by now."""
        eased = self._quarantine.take_retry_request()
        if eased:
            self._waiting.reconsider()
        commands: list[AnyCommand] = []
        while (first := self._waiting.first) is not None and self._waiting.may_retry():
            commands += self._try_place(self._requests[first[-1]], now, may_reserve=True)
            if self._waiting.first == first:
                break
        while eased and (suspect := self._quarantine.first) is not None:
            commands += self._try_place(
                suspect, now, may_reserve=self._goes_before_all(suspect.rank)
            )
            if self._quarantine.first is suspect:
                break
        return commands

    def on_workers_changed(self) -> None:
        """Workers joined, left or said something new of themselves, or a request avoids others
        than before: what waits is placed again."""
        self.room_may_have_grown = True
        self._waiting.reconsider()
        self._quarantine.request_retry()

    def _goes_before_all(self, rank: QueueRank) -> bool:
        first = self._waiting.first
        return first is None or rank < first

    def _place_deferred(self, now: float, *, max_vain: int) -> list[AnyCommand]:
        """Let in those held back whose time has come, looking at few in vain."""
        commands: list[AnyCommand] = []
        n_vain = 0
        for rank in list(self._deferred):
            if n_vain == max_vain:
                break
            may_reserve = self._goes_before_all(rank)
            commands += self._try_place(self._requests[rank[-1]], now, may_reserve=may_reserve)
            n_vain += rank in self._deferred
        return commands

    def try_elsewhere(
        self, tracked: RequestState, decode: WorkerId, full_until_s: float, now: float
    ) -> list[AnyCommand]:
        """`decode` has no room: another one, or wait."""
        self._cluster.decodes.refused(decode, tracked.request_id, full_until_s)
        self._release(tracked, now)
        tracked.refused_by.add(decode)
        return self._try_place(tracked, now, may_reserve=True)

    def _on_reserve_timeout(
        self, tracked: RequestState, decode: WorkerId, now: float
    ) -> list[AnyCommand]:
        """`decode` does not answer: another one, or another try with another id."""
        tracked.silent.add(decode)
        full_until_s = now + self._config.reserve_timeout_s
        commands = self.send(decode, Cancel(request_id=tracked.request_id))
        return commands + self.try_elsewhere(tracked, decode, full_until_s, now)

    def _try_place(
        self, tracked: RequestState, now: float, *, may_reserve: bool
    ) -> list[AnyCommand]:
        """Reserve, wait, or end: for a request that holds nothing."""
        request = tracked.request
        for role in ("prefill", "decode"):
            if not self._cluster.accepting(role):
                reason = f"no {role} worker is live that takes requests"
                self.refusals["unavailable"] += 1
                return self.refuse(
                    tracked, Reject(request.request_id, "unavailable", reason, RETRY_S)
                )
        if tracked.silent:
            decodes = {info.worker_id for info in self._cluster.accepting("decode")}
            if decodes <= tracked.silent:
                return self.retry(tracked, f"no answer from {', '.join(sorted(decodes))}", now)
        apart_from = self._quarantine.busy if tracked.is_suspect else frozenset()
        try:
            if apart_from and not self._placer.can_keep_apart(request, apart_from):
                return self._keep_apart(tracked)
            not_to_ask = tracked.refused_by | tracked.silent
            placement, job = self._placer.place(request, not_to_ask, now, apart_from=apart_from)
        except NoWorkerFits as error:
            self.refusals["too_long"] += 1
            return self.refuse(tracked, Reject(request.request_id, "too_long", str(error)))
        verdict = admission_policy.ADMITTED
        if not tracked.is_retry:
            applicant = self._applicant(tracked, placement, now)
            verdict = admission_policy.decide_on_arrival(
                self._config.admission, applicant, self._cluster.decodes
            )
            if verdict.misses:
                return self._on_not_admitted(tracked, placement, verdict, now)
        if placement.decode is None:
            asked_all = not tracked.refused_by
            commands = self._wait(tracked)
            if asked_all:
                takers = self._placer.takers(request, tracked.silent, apart_from=apart_from)
                self._waiting.set_shortage(PageShortage(tracked.rank, job.n_pages, takers))
            return commands
        if not may_reserve:
            return self._wait(tracked)
        return self._reserve(tracked, placement, placement.decode, job, verdict, now)

    def _applicant(self, tracked: RequestState, placement: Placement, now: float) -> AdmissionCase:
        request = tracked.request
        return AdmissionCase(
            placement,
            len(request.token_ids),
            self._slos.ttft_s(request, placement.chosen.pool_worker),
            self._slos.tbt_s(request, placement.decode),
            now,
            now - tracked.arrived_s,
        )

    def _on_not_admitted(
        self, tracked: RequestState, placement: Placement, verdict: AdmissionVerdict, now: float
    ) -> list[AnyCommand]:
        """Hold a request back if that may help, or refuse it.

        Decode gets less busy by itself; a first token that is late gets only later.
        """
        deferred = tracked.phase is Phase.DEFERRED
        defer_s = tracked.request.defer_s
        deadline_s = tracked.arrived_s + (self._config.defer_s if defer_s is None else defer_s)
        has_room = deferred or len(self._deferred) < self._config.deferred_at_most
        if verdict.misses == "tbt" and has_room and now < deadline_s:
            if not deferred:
                self._stop_waiting(tracked)
                self._explain(tracked, placement, verdict, now, "deferred")
                tracked.phase = Phase.DEFERRED
                tracked.placement = None
                self.deadlines.set(tracked, deadline_s)
                insort(self._deferred, tracked.rank)
            return []
        self._explain(tracked, placement, verdict, now, "refused")
        return self.refuse_overloaded(
            tracked, verdict.misses, verdict.reason, verdict.retry_after_s
        )

    def _keep_apart(self, tracked: RequestState) -> list[AnyCommand]:
        """All workers that could take it try requests that are as suspect."""
        if tracked.phase is Phase.QUARANTINED:
            return []
        self._stop_waiting(tracked)
        tracked.phase = Phase.QUARANTINED
        tracked.placement = None
        tracked.refused_by.clear()
        self.deadlines.set(tracked, tracked.arrived_s + self._config.request_timeout_s)
        self._quarantine.wait(tracked)
        return []

    def _wait(self, tracked: RequestState) -> list[AnyCommand]:
        if tracked.phase in (Phase.DEFERRED, Phase.QUARANTINED):
            self._stop_waiting(tracked)
        tracked.phase = Phase.WAITING
        tracked.placement = None
        self.deadlines.set(tracked, tracked.arrived_s + self._patience_s(tracked))
        tracked.refused_by.clear()
        if tracked.rank in self._waiting:
            return []
        # Retries are not turned away: they are no more than the workers held.
        if len(self._waiting) >= self._config.max_waiting and not tracked.is_retry:
            reason = f"{len(self._waiting)} requests wait for decode pages, which is the limit"
            return self.refuse_overloaded(tracked, "queue_full", reason)
        self._waiting.add(tracked.rank)
        return []

    def _reserve(
        self,
        tracked: RequestState,
        placement: Placement,
        decode: WorkerId,
        job: PlacementRequest,
        verdict: AdmissionVerdict,
        now: float,
    ) -> list[AnyCommand]:
        self._stop_waiting(tracked)
        request = tracked.request
        tracked.first_token_s = now + placement.ttft_s
        stay = DecodeStay(job.n_tokens, tracked.first_token_s)
        tbt_slo_s = self._slos.tbt_s(request, decode)
        self._cluster.promise(placement, decode, job, stay, now, tbt_slo_s=tbt_slo_s)
        tracked.phase = Phase.RESERVING
        tracked.placement = placement
        if tracked.is_suspect:
            self._quarantine.begin(tracked)
        tracked.asked_s = now
        self.deadlines.set(tracked, now + self._config.reserve_timeout_s)
        if self._replicator is not None:
            n_known = max(max(row.n_blocks, row.local_blocks) for row in placement.estimates)
            known = request.block_hashes[:n_known]
            self._replicator.used(known, request.token_ids, job.block_size, now)
        self._explain(tracked, placement, verdict, now, "placed")
        message = ReserveDecode(
            request_id=request.request_id, n_tokens=job.n_tokens, stopping=request.stopping
        )
        return self.send(decode, message)

    def _explain(
        self,
        tracked: RequestState,
        placement: Placement,
        verdict: AdmissionVerdict,
        now: float,
        outcome: DecisionOutcome,
    ) -> None:
        self.decisions.append(
            Decision(
                tracked.request_id,
                tracked.request.attempt,
                now,
                placement,
                outcome,
                verdict.prefill_load,
                verdict.decode_load,
                verdict.reason,
            )
        )

    # -- between prefill and decode ----------------------------------------------------------

    def admit_late(
        self, tracked: RequestState, done: PrefillDone, now: float
    ) -> list[AnyCommand] | None:
        """What to do if decode is too busy for a request whose prefill is done; None: it
        goes on. Nothing was delivered yet, so it may still wait or be refused."""
        assert tracked.placement is not None
        verdict = self.late_admission.verdict(tracked)
        if self.late_admission.wait(tracked, verdict, done, now):
            self._cluster.prefills.release(tracked.placement.prefill, tracked.request_id, now)
            self._prefill_passed(tracked)
            self.room_may_have_grown = True
            return []
        if verdict.misses and self.late_admission.refuses:
            return self._refuse_late(tracked, verdict, now)
        return None

    def _refuse_late(
        self, tracked: RequestState, verdict: AdmissionVerdict, now: float
    ) -> list[AnyCommand]:
        """Its prefill was in vain."""
        request_id, placement, decode = tracked.request_id, tracked.placement, tracked.decode
        assert placement is not None and decode is not None
        self._explain(tracked, placement, verdict, now, "refused_late")
        self.refusals["tbt_late"] += 1
        self.end(tracked, now)
        self._placer.forget(request_id)
        reject = Reject(request_id, "overloaded", verdict.reason, verdict.retry_after_s)
        return [reject, *self.send(decode, Cancel(request_id=request_id))]

    def decoding(self, tracked: RequestState, now: float) -> None:
        """Its prefill is done, and decode goes on with it."""
        assert tracked.placement is not None and tracked.decode is not None
        self._cluster.prefills.release(tracked.placement.prefill, tracked.request_id, now)
        self._prefill_passed(tracked)
        self._cluster.decodes.start(tracked.decode, tracked.request_id, now)
        tracked.phase = Phase.DECODING
        self.deadlines.set(tracked, float("inf"))

    def progressed(self, tracked: RequestState) -> None:
        """Decode has produced a token of it: it is no suspect any more."""
        self._quarantine.over(tracked)

    def _prefill_passed(self, tracked: RequestState) -> None:
        """It has done no harm at its prefill workers; a decode worker that prefilled by itself
        has yet to decode."""
        self._quarantine.on_harmless(tracked, [w for w in tracked.writers if w != tracked.decode])

    def finished(self, tracked: RequestState, n_new: int, now: float) -> None:
        """Decode has produced its last token, and freed its pages with it."""
        request = tracked.request
        assert tracked.placement is not None and tracked.decode is not None
        seconds = self._cluster.decodes.decoded_for(tracked.decode, request.request_id, now)
        self._cluster.decodes.ended(seconds)
        if n_new > 1:
            self.prediction_errors.observe("tbt", tracked.placement.tbt_s, seconds / (n_new - 1))
        self.end(tracked, now)
        self._placer.forget(request.request_id)

    # -- on the way out ----------------------------------------------------------------------

    def give_up(
        self,
        tracked: RequestState,
        now: float,
        *,
        because: str = "",
        casualty: Casualty | None = None,
    ) -> list[AnyCommand]:
        """Cancel what a request holds on live workers, and end it; try again if `because`.

        Args:
            tracked: not over.
            now: seconds.
            because: why it is to be tried again; empty: it is not.
            casualty: the worker that was lost, or hung, while it computed this try, if so.
        """
        request_id, prefill, decode = tracked.request_id, tracked.prefill, tracked.decode
        # A decode worker that prefills by itself lets go of all at one word.
        prefilling = tracked.phase is Phase.PREFILLING and bool(tracked.writers)
        commands: list[AnyCommand] = []
        keep_landing = False
        if prefilling and prefill is not None and prefill in self._cluster:
            assert decode is not None
            commands += self.send(prefill, Cancel(request_id=request_id))
            keep_landing = decode in self._cluster
            if keep_landing:
                deadline_s = now + self._config.reserve_timeout_s
                lost = any(writer not in self._cluster for writer in tracked.writers)
                stopping = OrphanedLanding(
                    prefill, tracked.writers, decode, deadline_s, in_doubt=lost
                )
                self._stopping.add(request_id, stopping)
        elif tracked.phase not in UNPLACED:
            assert decode is not None
            cancel = Cancel(request_id=request_id, landing_in_doubt=prefilling)
            commands += self.send(decode, cancel)
        if because:
            return commands + self.retry(
                tracked, because, now, keep_landing=keep_landing, casualty=casualty
            )
        self.end(tracked, now, keep_landing=keep_landing)
        self._placer.forget(request_id)
        return commands

    def retry(
        self,
        tracked: RequestState,
        reason: str,
        now: float,
        *,
        retryable: bool = True,
        invalid: bool = False,
        keep_landing: bool = False,
        casualty: Casualty | None = None,
    ) -> list[AnyCommand]:
        """End this try, whose workers know; another one follows if it may help and is allowed."""
        if casualty is not None:
            self._placer.avoid(tracked.request_id, casualty.worker_id)
        self.end(tracked, now, keep_landing=keep_landing)
        # A try that came to decoding has delivered a token: it is progress, however often
        # the request is preempted.
        decoding = tracked.phase is Phase.DECODING
        fruitless = 0 if decoding else tracked.request.fruitless + 1
        if retryable and not invalid and fruitless < self._config.max_attempts:
            return [Resubmit(tracked.request_id, reason, casualty)]
        self._placer.forget(tracked.request_id)
        if retryable and not invalid:
            reason = f"{reason} ({fruitless} tries in a row brought no token)"
        return [Fail(tracked.request_id, reason, invalid)]

    def refuse(self, tracked: RequestState, reject: Reject) -> list[AnyCommand]:
        """End a request that holds nothing; a retry, whose stream has begun, fails instead."""
        self._stop_waiting(tracked)
        self.deadlines.set(tracked, float("inf"))
        del self._requests[tracked.request_id]
        self._placer.forget(tracked.request_id)
        return [Fail(tracked.request_id, reject.reason) if tracked.is_retry else reject]

    def refuse_overloaded(
        self, tracked: RequestState, what: str, reason: str, retry_after_s: float = RETRY_S
    ) -> list[AnyCommand]:
        """Refuse a request that holds nothing, for lack of room; `what` says of which."""
        self.refusals[what] += 1
        return self.refuse(tracked, Reject(tracked.request_id, "overloaded", reason, retry_after_s))

    def _refuse_harmful(self, tracked: RequestState) -> list[AnyCommand]:
        """It is tried on no further worker."""
        casualties = tracked.request.casualties
        starts = ", ".join(f"{c.worker_id} (start {c.generation})" for c in casualties)
        self.refusals["harmful"] += 1
        del self._requests[tracked.request_id]
        self._placer.forget(tracked.request_id)
        reason = (
            f"{len(casualties)} workers were lost or hung while they computed this request: "
            f"{starts}; it is not tried on another"
        )
        return [Fail(tracked.request_id, reason, invalid=True, casualties=casualties)]

    def refuse_permanently(
        self, tracked: RequestState, reason: str, now: float
    ) -> list[AnyCommand]:
        """Its decode worker says that it never has room for it: nothing is held there."""
        self.refusals["too_long"] += 1
        self._release(tracked, now)
        return self.refuse(tracked, Reject(tracked.request_id, "too_long", reason))

    def end(self, tracked: RequestState, now: float, *, keep_landing: bool = False) -> None:
        """The request is over; with `keep_landing` a `OrphanedLanding` has its landing now."""
        self._stop_waiting(tracked)
        self._release(tracked, now, keep_landing=keep_landing)
        self.deadlines.set(tracked, float("inf"))
        del self._requests[tracked.request_id]
        self.room_may_have_grown = True

    # -- landings of requests that are over --------------------------------------------------

    def free_landing(self, request_id: RequestId, *, in_doubt: bool) -> list[AnyCommand]:
        """Prefill writes no more, or can't be asked: decode may let go."""
        self.room_may_have_grown = True
        return self._stopping.free(request_id, in_doubt=in_doubt)

    def forget_landing(self, request_id: RequestId) -> None:
        """Decode has let go by itself."""
        self.room_may_have_grown = True
        self._stopping.forget(request_id)

    # -- many at once ------------------------------------------------------------------------

    def on_worker_lost(self, lost: WorkerInfo, reason: str, now: float) -> list[AnyCommand]:
        """A worker has left the cluster: what was on it is tried again elsewhere.

        One that was draining was told to go: that speaks against no request.
        """
        worker_id = lost.worker_id
        commands = self._stopping.on_worker_lost(worker_id)
        for tracked in self.all():
            on_prefill = worker_id in tracked.writers and tracked.phase not in PREFILLED
            if on_prefill or tracked.decode == worker_id:
                casualty = None
                if tracked.is_computed_at(worker_id) and not lost.draining:
                    casualty = Casualty(worker_id, lost.generation)
                because = f"{worker_id} is lost: {reason}"
                commands += self.give_up(tracked, now, because=because, casualty=casualty)
        self.on_workers_changed()  # perhaps none is left for what waits
        return commands

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Act on the deadlines that are over."""
        commands: list[AnyCommand] = []
        for tracked in self.deadlines.pop_due(now):
            if self._requests.get(tracked.request_id) is tracked:  # else ended by one before it
                commands += self._on_deadline(tracked, now)
        commands += self._stopping.on_tick(now)
        self._cluster.decodes.on_tick(now)
        self._ticked_s = now
        self.room_may_have_grown = True
        if self._config.admission != "none":
            self._waiting.reconsider()  # its first token may be late by now
        return commands + self._place_deferred(now, max_vain=MAX_FAILED_RETRIES)

    def _on_deadline(self, tracked: RequestState, now: float) -> list[AnyCommand]:
        if tracked.phase is Phase.WAITING:
            waited_s = now - tracked.arrived_s
            reason = f"no decode pages came free in {waited_s:.3g} s"
            return self.refuse_overloaded(tracked, "pages", reason)
        if tracked.phase is Phase.DEFERRED:
            waited_s = now - tracked.arrived_s
            reason = f"decode was too busy for {waited_s:.3g} s"
            return self.refuse_overloaded(tracked, "tbt", reason)
        if tracked.phase is Phase.QUARANTINED:
            waited_s = now - tracked.arrived_s
            reason = f"a worker was lost under it, and none came free to try it in {waited_s:.3g} s"
            return self.refuse_overloaded(tracked, "quarantine", reason)
        decode = tracked.decode
        assert decode is not None, "it is reserving, prefilling, or has landed"
        if tracked.phase is Phase.RESERVING:
            return self._on_reserve_timeout(tracked, decode, now)
        if tracked.phase is Phase.LANDED:
            if self.late_admission.refuses:
                return self._refuse_late(tracked, self.late_admission.verdict(tracked), now)
            self.late_admission.due(tracked, now)
            return []
        timeout_s = self._config.request_timeout_s
        because = f"{tracked.prefill} did not finish in {timeout_s:.3g} s"
        return self.give_up(tracked, now, because=because, casualty=self._hung(tracked))

    def _hung(self, tracked: RequestState) -> Casualty | None:
        """The prefill worker of a request that it has not finished in time, unless it finished
        others meanwhile: then its queue was long."""
        hung = None if tracked.prefill is None else self._cluster.get(tracked.prefill)
        if hung is None or tracked.prefill == tracked.decode:
            return None
        if not self._cluster.prefills.hangs(hung.worker_id, tracked.request_id):
            return None
        return Casualty(hung.worker_id, hung.generation)

    # -- inside ------------------------------------------------------------------------------

    def _release(self, tracked: RequestState, now: float, *, keep_landing: bool = False) -> None:
        """Take a request's claims out of the books."""
        self._quarantine.over(tracked)
        if tracked.prefill is not None:
            self._cluster.prefills.release(tracked.prefill, tracked.request_id, now)
        if tracked.decode is not None and not keep_landing:
            self.late_admission.stir(tracked.decode)
            self._cluster.decodes.release(tracked.decode, tracked.request_id)

    def _stop_waiting(self, tracked: RequestState) -> None:
        """It waits no more, wherever it did."""
        if tracked.phase is Phase.WAITING:
            self._waiting.remove(tracked.rank)
        if tracked.phase is Phase.QUARANTINED:
            self._quarantine.leave_line(tracked)
        if tracked.phase is Phase.DEFERRED:
            i = bisect_left(self._deferred, tracked.rank)
            if i < len(self._deferred) and self._deferred[i] == tracked.rank:
                del self._deferred[i]
        if tracked.phase is Phase.LANDED:
            self.late_admission.leave(tracked)

    def _patience_s(self, tracked: RequestState) -> float:
        """How long it may wait for pages, from its arrival."""
        slo_s = self._slos.ttft_s(tracked.request)
        if self._config.admission == "none" or tracked.is_retry or slo_s is None:
            return self._config.request_timeout_s
        return min(slo_s, self._config.request_timeout_s)

    def check(self) -> None:
        """Audit: phases, the queue and the cluster's books tell one story, of live workers."""
        self._waiting.check()
        for phase, waiting in ((Phase.WAITING, self._waiting), (Phase.DEFERRED, self._deferred)):
            queue = list(waiting)
            assert queue == sorted(queue)
            ranks = {t.rank for t in self._requests.values() if t.phase is phase}
            assert set(queue) == ranks
            assert len(queue) == len(ranks), "a request waits twice"
        assert len(self._deferred) <= self._config.deferred_at_most
        self._check_first_has_no_room()
        self.late_admission.check([t for t in self._requests.values() if t.phase is Phase.LANDED])
        quarantined = {t.request_id for t in self.all() if t.phase is Phase.QUARANTINED}
        self._quarantine.check(self.all(), quarantined)
        self.deadlines.check(self.all())
        assert not self._requests.keys() & set(self._stopping)
        planned: dict[WorkerId, set[RequestId]] = {}
        held = self._stopping.held()
        for request_id, tracked in self._requests.items():
            if tracked.phase in UNPLACED:
                assert tracked.placement is None
                continue
            assert tracked.writers or tracked.prefill == tracked.decode
            assert tracked.decode is not None
            held.setdefault(tracked.decode, set()).add(request_id)
            if tracked.phase not in PREFILLED:
                for writer in tracked.writers:
                    planned.setdefault(writer, set()).add(request_id)
        for info in self._cluster.workers():
            if info.role == "prefill":
                assert self._cluster.prefills.requests(info.worker_id) == planned.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s queue"
            elif info.role == "decode":
                assert self._cluster.decodes.requests(info.worker_id) == held.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s claims"
        assert not planned and not held, "a request is on a worker that is not here"

    def _check_first_has_no_room(self) -> None:
        """No request waits although trying everything again would place it."""
        first = self._waiting.first
        ready = all(self._cluster.accepting(role) for role in ("prefill", "decode"))
        if first is not None and ready:
            tracked = self._requests[first[-1]]
            apart_from = self._quarantine.busy if tracked.is_suspect else frozenset()
            if apart_from and not self._placer.can_keep_apart(tracked.request, apart_from):
                return
            placement, _ = self._placer.place(
                tracked.request, tracked.silent, self._ticked_s, apart_from=apart_from
            )
            assert placement.decode is None, f"{first[-1]} waits, {placement.decode} has room"
