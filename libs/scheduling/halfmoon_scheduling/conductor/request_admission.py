"""Find workers for requests that hold nothing: reserve pages for them, let them wait, or refuse.

- A request that waits for pages is overtaken only by requests of a higher priority, or a long
  prompt would never start.
- A request that admission holds back may be overtaken: a short one may fit where it does not.
- Retries are never refused for their limits: their stream has begun, so they wait or fail.
"""

from dataclasses import replace
from math import inf

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Cancel, ReserveDecode, Role, WorkerInfo
from halfmoon_scheduling.admission import admission_policy
from halfmoon_scheduling.admission.admission_policy import AdmissionCase, AdmissionVerdict
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.admission.loss_history import LossHistory
from halfmoon_scheduling.admission.page_queue import PageShortage
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.decision_log import DecisionLog
from halfmoon_scheduling.conductor.kvstore_directory import KvstoreDirectory
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.request_endings import RETRY_S, RequestEndings
from halfmoon_scheduling.conductor.request_table import RequestTable
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.placement.estimates import Placement, PlacementRequest
from halfmoon_scheduling.placement.worker_limits import FeatureMissing, NoWorkerFits, stopping_at
from halfmoon_scheduling.prediction.decode_forecast import DecodeStay
from halfmoon_scheduling.requests.request_state import Phase, RequestRank, RequestState

#: Seconds for which requests wait for a role whose last worker was lost: that of a worker's lease.
#: What cuts off all workers at once, as a conductor that stood still, is over before that.
RETURN_S = 10.0
#: Seconds after which a refused client is told to come back at the latest.
MAX_RETRY_S = 60.0
#: Placements of deferred requests that may fail, each time one of them is tried.
MAX_FAILED_RETRIES = 4
#: Roles of which every request needs a worker.
_ROLES: tuple[Role, ...] = ("prefill", "decode")


class RequestAdmission:
    """Admit requests to workers, and retry those that wait."""

    def __init__(
        self,
        config: SchedulingConfig,
        cluster: Cluster,
        slos: Slos,
        placer: Placer,
        kvstores: KvstoreDirectory,
        table: RequestTable,
        endings: RequestEndings,
        log: DecisionLog,
        bounds: LimitBounds | None,
        losses: LossHistory,
    ) -> None:
        self._losses = losses
        self._bounds = bounds
        self._config = config
        self._mode = ADMISSION_MODES[config.admission]
        self._cluster = cluster
        self._slos = slos
        self._placer = placer
        self._kvstores = kvstores
        self._table = table
        self._endings = endings
        self._log = log
        #: The time of the last tick.
        self._ticked_s = 0.0
        #: When a worker of a role was last lost that had not been told to leave.
        self._lost_s: dict[Role, float] = {}

    # -- when requests are placed ------------------------------------------------------------

    def on_request_arrived(self, request: Request, now: float) -> list[AnyCommand]:
        """Place a request that has arrived; one that is known already is ignored."""
        if request.request_id in self._table or request.request_id in self._table.orphaned:
            return []
        state = self._table.add(request, now)
        if self._is_one_too_many(state):
            return self._refuse_one_too_many(state, now)
        self._cluster.decodes.on_tick(now)
        commands: list[AnyCommand] = []
        first_deferred = self._table.deferred.first
        if first_deferred is not None and first_deferred < state.rank:
            commands += self._place_deferred(now, max_failed=1)
        may_reserve = self._is_before_waiting(state.rank)
        return commands + self._try_place(state, now, may_reserve=may_reserve)

    def _is_one_too_many(self, state: RequestState) -> bool:
        """Return whether more requests wait for a first token than may.

        A retry always may, and a tenant with less than its share.
        """
        limit = self._config.max_queued_requests
        if limit is None or state.is_retry or self._table.n_without_token <= limit:
            return False
        return not self._table.is_within_share(state, limit)

    def _refuse_one_too_many(self, state: RequestState, now: float) -> list[AnyCommand]:
        n, limit = self._table.n_without_token - 1, self._config.max_queued_requests
        reason = (
            f"{n} requests wait for their first token, and max_queued_requests is {limit}; try"
            " again later, or have the operator raise --max-queued-requests"
        )
        shortest_s = min(self._cluster.prefills.queues_s(now).values(), default=0.0)
        retry_after_s = max(shortest_s, self._room_in_s(now))
        return self._endings.refuse_overloaded(state, "queue_full", reason, retry_after_s)

    def place_waiting(self, now: float) -> list[AnyCommand]:
        """Place requests that wait for pages, in order, until one has to go on waiting.

        Then place suspects for which a worker has become free.
        """
        quarantine = self._table.quarantine
        worker_is_free = quarantine.take_retry_request()
        if worker_is_free:
            self._table.waiting.reconsider()
        commands = self._place_first(now)
        while self._config.shares_decode and (state := self._table.to_make_room()) is not None:
            assert state.decode is not None
            self._table.decode_shares.on_stopped(state.decode)
            because = "it made room for a tenant with fewer requests at decode"
            commands += self._endings.give_up(state, now, because=because, counts=False)
            commands += self._place_first(now)
        for suspect in quarantine.waiting if worker_is_free else ():
            may_reserve = self._is_before_waiting(suspect.rank)
            commands += self._try_place(suspect, now, may_reserve=may_reserve)
        return commands

    def _place_first(self, now: float) -> list[AnyCommand]:
        """Place requests that wait for pages, in order, until one has to go on waiting."""
        waiting = self._table.waiting
        commands: list[AnyCommand] = []
        while (first := waiting.first) is not None and waiting.may_retry():
            commands += self._try_place(self._table[first[-1]], now, may_reserve=True)
            if waiting.first == first:
                break
        return commands

    def on_workers_changed(self) -> None:
        """Have all that wait placed again.

        Workers have joined, left or changed, or a request avoids other workers than before.
        """
        self._table.waiting.reconsider()
        self._table.quarantine.request_retry()

    def on_worker_lost(self, lost: WorkerInfo, now: float) -> None:
        """Have requests that wait placed again, on the workers that are left or come back."""
        if not lost.draining:
            self._lost_s[lost.role] = now
        self.on_workers_changed()

    def on_other_layout(self) -> list[AnyCommand]:
        """Refuse what waits for workers that were lost: others have joined in their place."""
        reason = "all its workers were lost, and workers of another model have joined"
        return [
            command
            for state in self._table.all()
            for command in self._endings.refuse_unavailable(state, reason)
        ]

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Place deferred requests whose turn has come."""
        self._cluster.decodes.on_tick(now)
        if self._bounds is not None and not self._table.is_empty:
            self._bounds.on_tick(now - self._ticked_s)
        self._ticked_s = now
        if self._table.quarantine.waiting:
            self._table.quarantine.request_retry()  # a worker may be idle, or an event over, by now
        if self._mode.checks_limits:
            self._table.waiting.reconsider()  # its first token may be late by now
        return self._place_deferred(now, max_failed=MAX_FAILED_RETRIES)

    def _place_deferred(self, now: float, *, max_failed: int) -> list[AnyCommand]:
        """Place deferred requests in order, until `max_failed` have to go on waiting."""
        commands: list[AnyCommand] = []
        n_failed = 0
        for rank in list(self._table.deferred):
            if n_failed == max_failed:
                break
            may_reserve = self._is_before_waiting(rank)
            commands += self._try_place(self._table[rank[-1]], now, may_reserve=may_reserve)
            n_failed += rank in self._table.deferred
        return commands

    def _is_before_waiting(self, rank: RequestRank) -> bool:
        """Return whether a request goes before all that wait for pages."""
        first = self._table.waiting.first
        return first is None or rank < first

    # -- a reservation that came to nothing --------------------------------------------------

    def try_elsewhere(
        self,
        state: RequestState,
        decode: WorkerId,
        full_until_s: float,
        now: float,
        *,
        refusal: str = "",
    ) -> list[AnyCommand]:
        """Place a request again that a decode worker has no room for, for this reason."""
        state.refusal = refusal and f"{decode}: {refusal}"
        self._cluster.decodes.on_refused(decode, state.request_id, full_until_s)
        self._table.release(state, now)
        state.refused_by.add(decode)
        return self._try_place(state, now, may_reserve=True)

    def on_reserve_timeout(self, state: RequestState, now: float) -> list[AnyCommand]:
        """Place a request again whose decode worker did not answer the reservation."""
        decode = state.decode
        assert decode is not None
        state.unresponsive.add(decode)
        full_until_s = now + self._config.reserve_timeout_s
        commands = send_if_live(self._cluster, decode, Cancel(request_id=state.request_id))
        return commands + self.try_elsewhere(state, decode, full_until_s, now)

    def on_never_fits(self, state: RequestState, reason: str, now: float) -> list[AnyCommand]:
        """Refuse a request that its decode worker can never have room for."""
        self._table.release(state, now)
        return self._endings.refuse_too_long(state, reason)

    def on_wait_timeout(self, state: RequestState, now: float) -> list[AnyCommand]:
        """Refuse a request that has waited until its deadline, in any phase of `UNPLACED`."""
        waited_s = now - state.arrived_s
        if state.phase is Phase.DEFERRED:
            reason = f"decode was too busy for {waited_s:.3g} s"
            return self._endings.refuse_overloaded(state, "tbt", reason, self._room_in_s(now))
        if state.phase is Phase.QUARANTINED:
            reason = f"a worker was lost under it, and none came free to try it in {waited_s:.3g} s"
            return self._endings.refuse_overloaded(state, "quarantine", reason)
        if not all(map(self._cluster.accepting, _ROLES)):
            return self._refuse_without_workers(state)
        reason = f"no decode pages came free in {waited_s:.3g} s"
        if state.refusal:
            reason = f"no decode worker had room for {waited_s:.3g} s; {state.refusal}"
        return self._endings.refuse_overloaded(state, "pages", reason, self._room_in_s(now))

    def _room_in_s(self, now: float) -> float:
        """Estimate when decode has room for one more than wait now: requests end evenly."""
        decodes = self._cluster.decodes
        time_s = decodes.decode_time_s(now)
        if not decodes.n_running or time_s == inf:
            return RETRY_S
        n_before = len(self._table.waiting) + 1
        return min(MAX_RETRY_S, max(RETRY_S, n_before * time_s / decodes.n_running))

    # -- one placement -----------------------------------------------------------------------

    def _try_place(self, state: RequestState, now: float, *, may_reserve: bool) -> list[AnyCommand]:
        """Reserve pages for a request that holds nothing, let it wait, or end it."""
        request = state.request
        missing = [role for role in _ROLES if not self._cluster.accepting(role)]
        if missing:
            if all(now < self._lost_s.get(role, -inf) + RETURN_S for role in missing):
                return self._wait(state, now)
            return self._refuse_without_workers(state)
        if state.unresponsive:
            decodes = {info.worker_id for info in self._cluster.accepting("decode")}
            if decodes <= state.unresponsive:
                reason = f"no answer from {', '.join(sorted(decodes))}"
                return self._endings.retry(state, reason, now)
        if request.casualties:
            state.charges = self._losses.charges(request.casualties)
            if self._is_to_be_alone(state):
                if now < self._losses.settled_s(state.charges):
                    return self._quarantine(state)
                if any(charge.alone for charge in state.charges):
                    return self._endings.refuse_harmful(state)
        apart_from = self._apart_from(state)
        try:
            if apart_from and not self._placer.can_keep_apart(request, apart_from):
                return self._quarantine(state) if state.is_suspect else self._wait(state, now)
            not_to_ask = state.refused_by | state.unresponsive
            placement, job = self._placer.place(request, not_to_ask, now, apart_from=apart_from)
        except FeatureMissing as error:
            return self._endings.refuse_unsupported(state, str(error))
        except NoWorkerFits as error:
            return self._endings.refuse_too_long(state, str(error))
        if not state.is_retry and not state.n_placements:
            queue_s, most_s = placement.chosen.queue_s, self._config.max_queue_s
            if most_s is not None and queue_s > most_s:
                return self._refuse_long_queue(state, placement, most_s, now)
        verdict = self._verdict(state, placement, now)
        if verdict.misses:
            return self._on_not_admitted(state, placement, verdict, now)
        if placement.decode is None:
            asked_all, takers = not state.refused_by, None
            if state.unresponsive:
                takers = self._placer.takers(request, state.unresponsive, apart_from=apart_from)
                if not takers:
                    # It avoids all others: no report of free pages would ever let it go on.
                    reason = f"no answer from {', '.join(sorted(state.unresponsive))}"
                    return self._endings.retry(state, reason, now)
            commands = self._wait(state, now)
            if asked_all and self._table.waiting.first == state.rank:
                if takers is None:
                    takers = self._placer.takers(request, frozenset(), apart_from=apart_from)
                self._table.waiting.set_shortage(PageShortage(state.rank, job.n_pages, takers))
            return commands
        if not may_reserve:
            return self._wait(state, now)
        return self._reserve(state, placement, placement.decode, job, verdict, now)

    def _is_to_be_alone(self, state: RequestState) -> bool:
        return len(state.charges) >= self._config.max_casualties

    def _apart_from(self, state: RequestState) -> frozenset[WorkerId]:
        """Return the workers at which a request must not be tried now."""
        quarantine = self._table.quarantine
        if not state.is_suspect:
            return quarantine.workers_kept_alone
        if not self._is_to_be_alone(state):
            return quarantine.busy_workers
        return quarantine.busy_workers | self._table.busy_workers()

    def _refuse_without_workers(self, state: RequestState) -> list[AnyCommand]:
        role = next(role for role in _ROLES if not self._cluster.accepting(role))
        reason = f"no {role} worker is live that takes requests"
        return self._endings.refuse_unavailable(state, reason)

    def _verdict(self, state: RequestState, placement: Placement, now: float) -> AdmissionVerdict:
        if state.is_retry:
            return admission_policy.ADMITTED
        request = state.request
        n_tokens = len(request.token_ids)
        case = AdmissionCase(
            placement,
            n_tokens,
            self._slos.ttft_s(request, placement.chosen.pool_worker),
            self._slos.tbt_s(request, placement.decode),
            now,
            now - state.arrived_s,
        )
        if self._bounds is not None:
            case = replace(
                case,
                profile_ttft_s=self._cluster.prefills.profile_s(placement.chosen, n_tokens),
                profile_tbt_s=self._cluster.decodes.profile_tbt_s(placement.decode, n_tokens),
            )
        return admission_policy.decide_on_arrival(
            self._config.admission, case, self._cluster.decodes, self._bounds
        )

    def _on_not_admitted(
        self, state: RequestState, placement: Placement, verdict: AdmissionVerdict, now: float
    ) -> list[AnyCommand]:
        """Defer a request if that may help, or refuse it.

        Decode's load falls by itself; a first token that is late only gets later.
        """
        is_deferred = state.phase is Phase.DEFERRED
        defer_s = state.request.defer_s
        deadline_s = state.arrived_s + (self._config.defer_s if defer_s is None else defer_s)
        has_room = is_deferred or len(self._table.deferred) < self._config.deferred_at_most
        if verdict.misses == "tbt" and has_room and now < deadline_s:
            if not is_deferred:
                self._table.leave_queues(state)
                self._log.record(state, placement, verdict, now, "deferred")
                state.phase = Phase.DEFERRED
                state.placement = None
                self._table.deadlines.set(state, deadline_s)
                self._table.deferred.add(state.rank)
            return []
        self._log.record(state, placement, verdict, now, "refused")
        return self._endings.refuse_overloaded(
            state, verdict.misses, verdict.reason, verdict.retry_after_s
        )

    def _refuse_long_queue(
        self, state: RequestState, placement: Placement, most_s: float, now: float
    ) -> list[AnyCommand]:
        """Refuse a request that would wait too long for its prefill to start."""
        queue_s = placement.chosen.queue_s
        reason = (
            f"predicted queue is {queue_s:.3g} s at {placement.prefill}, and max_queue_s is"
            f" {most_s:.3g}; try again later, or have the operator raise --max-queue-s"
        )
        # The queue shrinks by a second each second.
        retry_after_s = max(admission_policy.MIN_RETRY_S, queue_s - most_s)
        verdict = AdmissionVerdict(reason=reason, retry_after_s=retry_after_s)
        self._log.record(state, placement, verdict, now, "refused")
        return self._endings.refuse_overloaded(state, "queue_time", reason, retry_after_s)

    def _quarantine(self, state: RequestState) -> list[AnyCommand]:
        """Let a suspect wait: all workers that could take it have another suspect."""
        if state.phase is Phase.QUARANTINED:
            return []
        self._table.leave_queues(state)
        state.phase = Phase.QUARANTINED
        state.placement = None
        state.refused_by.clear()
        deadline_s = state.arrived_s + self._config.request_timeout_s
        self._table.deadlines.set(state, deadline_s)
        self._table.quarantine.wait(state)
        return []

    def _wait(self, state: RequestState, now: float) -> list[AnyCommand]:
        """Let a request wait for decode pages, or refuse it when too many wait."""
        if state.phase in (Phase.DEFERRED, Phase.QUARANTINED):
            self._table.leave_queues(state)
        state.phase = Phase.WAITING
        state.placement = None
        self._table.deadlines.set(state, state.arrived_s + self._max_wait_s(state))
        state.refused_by.clear()
        waiting = self._table.waiting
        if state.rank in waiting:
            return []
        # Retries are not turned away: they are no more than the workers held.
        most = self._config.max_waiting
        is_full = len(waiting) >= most and not self._table.is_within_share(state, most)
        if is_full and not state.is_retry:
            reason = f"{len(waiting)} requests wait for decode pages, which is the limit"
            room_s = self._room_in_s(now)
            return self._endings.refuse_overloaded(state, "queue_full", reason, room_s)
        waiting.add(state.rank)
        return []

    def _max_wait_s(self, state: RequestState) -> float:
        """Return the seconds from its arrival that a request may wait for pages."""
        config = self._config
        limits_s = [config.request_timeout_s]
        if not state.is_retry:
            if config.max_queue_s is not None:
                limits_s.append(config.max_queue_s)
            slo_s = self._slos.ttft_s(state.request)
            if self._mode.checks_limits and slo_s is not None:
                limits_s.append(slo_s)
        return min(limits_s)

    def _reserve(
        self,
        state: RequestState,
        placement: Placement,
        decode: WorkerId,
        job: PlacementRequest,
        verdict: AdmissionVerdict,
        now: float,
    ) -> list[AnyCommand]:
        """Enter a placement into the books, and ask the decode worker for pages."""
        self._table.leave_queues(state)
        self._table.on_placed(state)
        request = state.request
        state.placed_s, state.first_token_s = now, now + placement.ttft_s
        state.n_placements += 1
        state.forecast_tbt_s = verdict.forecast_tbt_s
        stay = DecodeStay(job.n_tokens, state.first_token_s)
        tbt_slo_s = self._slos.tbt_s(request, decode)
        self._cluster.promise(placement, decode, job, stay, now, tbt_slo_s=tbt_slo_s)
        state.phase = Phase.RESERVING
        state.placement = placement
        state.is_alone = state.is_suspect and self._is_to_be_alone(state)
        if state.is_suspect:
            self._table.quarantine.begin(state)
        state.reserve_sent_s = now
        self._table.deadlines.set(state, now + self._config.reserve_timeout_s)
        self._kvstores.on_prefix_used(request, placement, job.block_size, now)
        self._log.record(state, placement, verdict, now, "placed")
        state.may_share_pages = self._may_share_pages(request, placement, decode)
        info = self._cluster.get(decode)
        assert info is not None, "a placement names live workers"
        state.stopping = stopping_at(request, info, job.block_size)
        message = ReserveDecode(
            request_id=request.request_id,
            n_tokens=job.n_tokens,
            stopping=state.stopping,
            block_hashes=request.block_hashes if state.may_share_pages else (),
        )
        return send_if_live(self._cluster, decode, message)

    def _may_share_pages(self, request: Request, placement: Placement, decode: WorkerId) -> bool:
        """Return whether decode may share pages of blocks that it has with a request.

        Then all workers that prefill it must leave these blocks out. A decode worker that prefills
        by itself computes in the landing's own pages: with scores of the prompt, in all of them.
        """
        info = self._cluster.get(decode)
        if info is None or not info.keeps_pages:
            return False
        writers = placement.chosen.workers
        if not writers and request.sampling.prompt_logprobs is not None:
            return False
        infos = (self._cluster.get(writer) for writer in writers or (decode,))
        return all(info is not None and info.skips_held_blocks for info in infos)

    def check(self) -> None:
        """Audit: no request waits although another placement would succeed."""
        first = self._table.waiting.first
        is_ready = all(self._cluster.accepting(role) for role in ("prefill", "decode"))
        if first is None or not is_ready:
            return
        state = self._table[first[-1]]
        apart_from = self._apart_from(state)
        if apart_from and not self._placer.can_keep_apart(state.request, apart_from):
            return
        placement, _ = self._placer.place(
            state.request, state.unresponsive, self._ticked_s, apart_from=apart_from
        )
        assert placement.decode is None, f"{first[-1]} waits, {placement.decode} has room"
