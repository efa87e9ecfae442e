"""Run the conductor's state machine: events in, commands out.

It owns no clock, socket, task or dice: the same events at the same times give the same commands.
The machine dispatches events, drops late and foreign ones, and composes its parts. These know only
the parts before them in this list, and never the machine:

    RequestTable       the requests that are not over, with what each waits for or holds
    RequestEndings     give up, retry, refuse
    RequestAdmission   from the arrival to a reservation at decode
    DecodeHandover     from the end of prefill to the last token
    RequestTimeouts    deadlines of all phases

Handlers stand in the order in which a request meets them.
"""

from collections import Counter, deque
from collections.abc import Collection
from typing import NamedTuple, assert_never

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksReplicated,
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    ChangeRole,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    KvstoreLoad,
    KvstoreRefused,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
    ToConductor,
    TokensProduced,
    Welcome,
    WorkerInfo,
    WrongVersion,
)
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.admission.loss_history import LossHistory
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.cluster.cluster_state import Cluster, UnfitWorker
from halfmoon_scheduling.cluster.role_balancer import RoleBalancer
from halfmoon_scheduling.cluster.role_outlook import RoleOutlook
from halfmoon_scheduling.cluster.role_policy import RoleChange
from halfmoon_scheduling.cluster.role_refusals import RoleRefusal
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand, RefuseWorker
from halfmoon_scheduling.conductor.decision_log import Decision, DecisionLog
from halfmoon_scheduling.conductor.decode_handover import DecodeHandover
from halfmoon_scheduling.conductor.kvstore_directory import KvstoreDirectory
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.prediction_error import PredictionErrors
from halfmoon_scheduling.conductor.request_admission import RequestAdmission
from halfmoon_scheduling.conductor.request_endings import RequestEndings
from halfmoon_scheduling.conductor.request_table import RequestTable
from halfmoon_scheduling.conductor.request_timeouts import RequestTimeouts
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.directory.replication import CopyPrefix
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestedRole,
    RequestFinished,
    RequestProgressed,
    RoleChangeRequested,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.requests.landing_validation import landing_fault
from halfmoon_scheduling.requests.request_state import Phase, RequestState


class PoolLoads(NamedTuple):
    """The loads of both pools: times over their limits, or seconds where there is no limit."""

    prefill: float
    decode: float


class Conductor:
    """Place requests on workers and follow them until they are over."""

    def __init__(self, config: SchedulingConfig) -> None:
        """Create a conductor without workers."""
        self.config = config
        self.costs = CostModel(prior_bandwidth=config.prior_bandwidth)
        self.cluster = Cluster(
            self.costs,
            block_size=config.block_size,
            decode_time_s=config.decode_time_s,
            counts_running=config.admission_quantile > 0,
        )
        self.index = PrefixIndex()
        self._kvstores = KvstoreDirectory(config, self.cluster, self.index)
        self._placer = Placer(config, self.cluster, self.index, self.costs)
        self._role_balancer = RoleBalancer(config, self.cluster)
        self._log = DecisionLog(config.kept_decisions, config.kept_decision_bytes)
        slos = self._slos = Slos(config, self.cluster)
        q = config.admission_quantile
        self._bounds = LimitBounds(q) if q else None
        self._table = RequestTable(config, self.cluster, slos, self._bounds)
        losses = LossHistory()
        self._endings = RequestEndings(config, self.cluster, self._table, self._placer, losses)
        self._admission = RequestAdmission(
            config,
            self.cluster,
            slos,
            self._placer,
            self._kvstores,
            self._table,
            self._endings,
            self._log,
            self._bounds,
            losses,
        )
        self._handover = DecodeHandover(
            self.cluster, self._placer, self._table, self._endings, self._log, self._bounds
        )
        self._timeouts = RequestTimeouts(
            config, self.cluster, self._table, self._endings, self._admission, self._handover
        )

    # -- state for metrics and links ---------------------------------------------------------

    @property
    def n_requests(self) -> dict[str, int]:
        """Requests by phase; "stopping": those over that a prefill may still write."""
        return self._table.counts

    @property
    def is_idle(self) -> bool:
        """True if `n_requests` are all zero; found in the same time however many there are."""
        return self._table.is_empty

    @property
    def decisions(self) -> deque[Decision]:
        """Recent placements with the tables that explain them, the newest last."""
        return self._log.decisions

    @property
    def refusals(self) -> Counter[str]:
        """Requests refused, by the limit that would be missed or the resource that was lacking.

        Limits are "ttft", "tbt" and "tbt_late"; the others are "pages", "queue_full",
        "queue_time", "too_long", "unsupported", "unavailable", "harmful" and "quarantine".
        """
        return self._endings.refusals

    @property
    def following(self) -> KvEventFollower:
        """The follower that keeps the index up to date with the kvstores."""
        return self._kvstores.follower

    def copies_under_way(self) -> list[CopyPrefix]:
        """Return the copies of hot prefixes that kvstores make now."""
        return self._kvstores.copies_under_way()

    @property
    def prediction_errors(self) -> PredictionErrors:
        """Histograms of predicted against observed times."""
        return self._handover.prediction_errors

    @property
    def n_stopped_requests(self) -> int:
        """Requests that were stopped so far to make room for another tenant."""
        return self._table.decode_shares.n_stopped

    def loads(self, now: float) -> PoolLoads:
        """Return the loads of both pools, as means of their workers' times over the limits."""
        ttft_slo_s, tbt_slo_s = self.config.ttft_slo_s, self.config.tbt_slo_s
        return PoolLoads(
            _mean(self.cluster.prefills.queues_s(now).values()) / (ttft_slo_s or 1.0),
            _mean(self.cluster.decodes.loads_s().values()) / (tbt_slo_s or 1.0),
        )

    def role_outlook(self, now: float) -> RoleOutlook:
        """Return the roles of all workers, and what the policy of roles does next."""
        return self._role_balancer.outlook(now)

    def role_refusal(self, worker_id: WorkerId, role: RequestedRole) -> RoleRefusal | None:
        """Return why a `RoleChangeRequested` would change nothing; None: it is carried out."""
        return self._role_balancer.find_refusal(worker_id, role)

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a request; None when it is over or unknown."""
        state = self._table.get(request_id)
        return None if state is None else state.phase

    def n_tokens_of(self, request_id: RequestId) -> int:
        """Count the tokens of a try's prompt, earlier tries' included; 0 when it is over."""
        state = self._table.get(request_id)
        return 0 if state is None else len(state.request.token_ids)

    def decodes_at(self, request_id: RequestId) -> WorkerId | None:
        """Return the decode worker whose tokens a request waits for; None: it waits for none."""
        state = self._table.get(request_id)
        return state.decode if state and state.phase is Phase.DECODING else None

    def holds_at(self, request_id: RequestId) -> WorkerId | None:
        """Return the decode worker where a request, even one that is over, holds pages."""
        if (state := self._table.get(request_id)) is not None:
            return state.decode
        orphaned = self._table.orphaned.get(request_id)
        return None if orphaned is None else orphaned.decode

    def prefill_of(self, request_id: RequestId) -> WorkerId | None:
        """Return the prefill worker of a request that is placed and not over."""
        state = self._table.get(request_id)
        return None if state is None else state.prefill

    # -- the one entrance --------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take in one event; return what to do, in this order.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.
        """
        commands = self._dispatch(event, now)
        commands += self._handover.start_landed(now)
        commands += self._admission.place_waiting(now)
        return commands

    def _dispatch(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        match event:
            case RequestArrived():
                return self._admission.on_request_arrived(event.request, now)
            case RequestCancelled():
                return self._on_request_cancelled(event.request_id, now)
            case RequestProgressed():
                return self._on_request_progressed(event.request_id)
            case RequestFinished():
                return self._on_request_finished(event, now)
            case WorkerJoined():
                return self._on_worker_joined(event.worker, now)
            case WorkerLost():
                return self._on_worker_lost(event.worker_id, event.reason, now)
            case MessageReceived():
                return self._on_message(event.worker_id, event.message, now)
            case KvChanged():
                return self._kvstores.on_kv_events(event.worker_id, event.batch, now)
            case RoleChangeRequested():
                return self._change_roles(
                    self._role_balancer.on_requested(event.worker_id, event.role, now)
                )
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    def _on_message(
        self, worker_id: WorkerId, message: ToConductor, now: float
    ) -> list[AnyCommand]:
        if isinstance(message, Welcome):
            # A worker states its own record alone.
            own = message.worker.worker_id == worker_id
            return self._on_worker_joined(message.worker, now) if own else []
        if worker_id not in self.cluster:
            return []  # late, from a worker that was lost or refused
        match message:
            case DecodeReserved():
                return self._on_decode_reserved(worker_id, message, now)
            case DecodeRefused():
                return self._on_decode_refused(worker_id, message, now)
            case PrefillDone():
                return self._on_prefill_done(worker_id, message, now)
            case PrefillFailed():
                return self._on_prefill_failed(worker_id, message, now)
            case PrefillStopped():
                return self._on_prefill_stopped(worker_id, message)
            case DecodeFailed():
                return self._on_decode_failed(worker_id, message, now)
            case DecodeLoad():
                self._handover.on_decode_load(worker_id, message)
                return []
            case PrefillLoad():
                self.cluster.prefills.on_load(worker_id, message)
                return []
            case BlocksReplicated() | KvstoreRefused():
                self._kvstores.on_copy_answered(worker_id, message, now)
                return []
            case KvstoreLoad():
                return self._kvstores.on_load(worker_id, message, now)
            case BlocksSnapshot():
                return self._kvstores.on_snapshot(worker_id, message, now)
            case TokensProduced() | WrongVersion():
                return []  # tokens skip the core, and the link refuses workers of other versions
            case _:
                assert_never(message)

    # -- reservation -------------------------------------------------------------------------

    def _on_decode_reserved(
        self, worker_id: WorkerId, message: DecodeReserved, now: float
    ) -> list[AnyCommand]:
        request_id = message.request_id
        state = self._table.get(request_id)
        if state is None or state.decode != worker_id:
            orphaned = self._table.orphaned.get(request_id)
            if orphaned is not None and orphaned.decode == worker_id:
                return []  # a duplicate; the landing is freed when prefill has stopped
            return send_if_live(self.cluster, worker_id, Cancel(request_id=request_id))
        if state.phase is not Phase.RESERVING:
            return []
        n_tokens, may_hold = len(state.request.token_ids), state.may_share_pages
        if landing_fault(message, n_tokens, self.cluster.layout, may_hold=may_hold):
            full_until_s = now + self.config.reserve_timeout_s
            commands = send_if_live(self.cluster, worker_id, Cancel(request_id=request_id))
            return commands + self._admission.try_elsewhere(state, worker_id, full_until_s, now)
        return self._start_prefill(state, message, now)

    def _start_prefill(
        self, state: RequestState, reserved: DecodeReserved, now: float
    ) -> list[AnyCommand]:
        """Have the prefill worker of a request compute its KV into the landing."""
        assert state.placement is not None and state.decode is not None
        chosen, request = state.placement.chosen, state.request
        self.cluster.decodes.on_landing_reserved(state.decode, state.request_id)
        if chosen.workers:
            self.cluster.prefills.start(chosen.worker_id, state.request_id, now)
        state.phase = Phase.PREFILLING
        self._table.deadlines.set(state, now + self.config.request_timeout_s)
        writing_s = self._writing_s(reserved.expires_s, now - state.reserve_sent_s)
        state.landing_ends_s = now + writing_s
        cached = None
        if sources := self._placer.sources(state.placement, request):
            first, *others = map(self.cluster.address, sources)
            cached = CachedPrefix(first, chosen.n_blocks, tuple(others))
        home = self._placer.store_for(state.request_id, chosen)
        state.store_in = None if home is None else self.cluster.address(home)
        start = StartPrefill(
            request_id=state.request_id,
            token_ids=request.token_ids,
            n_prompt=request.n_prompt,
            block_hashes=request.block_hashes,
            landing=reserved.landing,
            landing_expires_s=writing_s,
            sampling=request.sampling,
            stopping=state.stopping or request.stopping,
            cached=cached,
            store_in=state.store_in,
            stages=tuple(self.cluster.stage_address(stage) for stage in chosen.workers[1:]),
            priority=request.priority,
            deadline_s=self._slos.first_token_left_s(
                request, chosen.pool_worker, now - state.arrived_s
            ),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            n_held_blocks=reserved.n_held_blocks,
        )
        return send_if_live(self.cluster, chosen.worker_id, start)

    def _writing_s(self, expires_s: float, since_sent_s: float) -> float:
        """Return the seconds in which prefill may write to a landing.

        The landing is no older than its reservation, so that much of its time is over at most. The
        margin covers messages on their way, and is at most half of the landing's time.
        """
        margin_s = min(self.config.landing_margin_s, expires_s / 2)
        return max(0.0, expires_s - since_sent_s - margin_s)

    def _on_decode_refused(
        self, worker_id: WorkerId, message: DecodeRefused, now: float
    ) -> list[AnyCommand]:
        state = self._table.get(message.request_id)
        if state is None or state.decode != worker_id or state.phase is not Phase.RESERVING:
            return []
        if not message.retryable:
            reason = f"{worker_id}: {message.reason}"
            if message.code in ("", error_codes.TOO_LONG):  # of old, it was the only reason
                return self._admission.on_never_fits(state, reason, now)
            return self._endings.retry(state, reason, now, retryable=False)
        full_until_s = now + message.retry_after_s
        return self._admission.try_elsewhere(
            state, worker_id, full_until_s, now, refusal=message.reason
        )

    # -- prefill -----------------------------------------------------------------------------

    def _on_prefill_done(
        self, worker_id: WorkerId, message: PrefillDone, now: float
    ) -> list[AnyCommand]:
        self._note_answer(worker_id, now)
        state = self._prefilling_at(worker_id, message.request_id)
        if state is None:
            return self._on_prefill_stopped(worker_id, message)
        return self._handover.on_prefill_done(state, message, now)

    def _on_prefill_failed(
        self, worker_id: WorkerId, message: PrefillFailed, now: float
    ) -> list[AnyCommand]:
        self._note_answer(worker_id, now)
        state = self._prefilling_at(worker_id, message.request_id)
        if state is None:
            return self._on_prefill_stopped(worker_id, message)
        assert state.decode is not None
        in_doubt = message.landing_in_doubt
        cancel = Cancel(request_id=message.request_id, landing_in_doubt=in_doubt)
        commands = send_if_live(self.cluster, state.decode, cancel)
        if not message.invalid:
            self._placer.avoid(message.request_id, message.culprit or worker_id)
            self._admission.on_workers_changed()
        culprit = self.cluster.get(message.culprit) if message.culprit is not None else None
        if culprit is not None and culprit.role == "kvstore":
            commands += self._kvstores.distrust(culprit.worker_id, now)
        reason = f"prefill at {worker_id} failed: {message.reason}"
        return commands + self._endings.retry(
            state,
            reason,
            now,
            retryable=message.retryable,
            invalid=message.invalid,
            code=message.code,
        )

    def _note_answer(self, worker_id: WorkerId, now: float) -> None:
        if worker_id in self.cluster.prefills:
            self.cluster.prefills.on_answer(worker_id, now)

    def _on_prefill_stopped(
        self, worker_id: WorkerId, message: PrefillStopped | PrefillFailed | PrefillDone
    ) -> list[AnyCommand]:
        """Free the landing of a request that was given up: its prefill has ended."""
        orphaned = self._table.orphaned.get(message.request_id)
        if orphaned is None or orphaned.prefill != worker_id:
            return []
        in_doubt = not isinstance(message, PrefillDone) and message.landing_in_doubt
        return self._table.orphaned.free(message.request_id, in_doubt=in_doubt)

    def _prefilling_at(self, worker_id: WorkerId, request_id: RequestId) -> RequestState | None:
        state = self._table.get(request_id)
        if state is None or state.phase is not Phase.PREFILLING or state.prefill != worker_id:
            return None
        return state

    # -- decode ------------------------------------------------------------------------------

    def _on_decode_failed(
        self, worker_id: WorkerId, message: DecodeFailed, now: float
    ) -> list[AnyCommand]:
        """Retry a request that decode has freed; its prefill, if it is under way, is to stop."""
        request_id = message.request_id
        state = self._table.get(request_id)
        if state is None or state.decode != worker_id:
            orphaned = self._table.orphaned.get(request_id)
            if orphaned is not None and orphaned.decode == worker_id:
                self._table.orphaned.forget(request_id)
            return []
        commands: list[AnyCommand] = []
        if state.phase is Phase.PREFILLING and state.prefill is not None and state.writers:
            commands = send_if_live(self.cluster, state.prefill, Cancel(request_id=request_id))
        if message.culprit is not None and not message.invalid:
            self._placer.avoid(request_id, message.culprit)
            self._admission.on_workers_changed()
        reason = f"decode at {worker_id} failed: {message.reason}"
        return commands + self._endings.retry(
            state,
            reason,
            now,
            retryable=message.retryable,
            invalid=message.invalid,
            code=message.code,
        )

    def _on_request_progressed(self, request_id: RequestId) -> list[AnyCommand]:
        state = self._table.get(request_id)
        if state is not None and state.phase is Phase.DECODING:
            self._handover.on_progress(state)
        return []

    def _on_request_finished(self, event: RequestFinished, now: float) -> list[AnyCommand]:
        state = self._table.get(event.request_id)
        if state is None or state.phase is not Phase.DECODING:
            return self._on_request_cancelled(event.request_id, now)
        return self._handover.on_finished(state, event, now)

    def _on_request_cancelled(self, request_id: RequestId, now: float) -> list[AnyCommand]:
        state = self._table.get(request_id)
        return [] if state is None else self._endings.give_up(state, now)

    # -- workers -----------------------------------------------------------------------------

    def _on_worker_joined(self, info: WorkerInfo, now: float) -> list[AnyCommand]:
        known = self.cluster.get(info.worker_id)
        commands: list[AnyCommand] = []
        if known is not None:
            if info.generation < known.generation:
                return []  # late, from an earlier start of the worker
            if (info.generation, info.role) != (known.generation, known.role):
                commands += self._on_worker_lost(info.worker_id, "it was started again", now)
                known = None
        layout = self.cluster.layout
        try:
            self.cluster.join(info)
        except UnfitWorker as error:
            if known is not None:
                commands += self._on_worker_lost(info.worker_id, str(error), now)
            return [*commands, RefuseWorker(info.worker_id, str(error))]
        if layout not in (None, self.cluster.layout):
            commands += self._admission.on_other_layout()
        self._admission.on_workers_changed()
        if info.role == "kvstore" and known is None:
            commands += self._kvstores.on_joined(info.worker_id, now)
        return commands

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now: float) -> list[AnyCommand]:
        if (lost := self.cluster.get(worker_id)) is None:
            return []
        self.cluster.leave(worker_id)
        self._kvstores.on_lost(worker_id)
        self._table.decode_shares.on_lost(worker_id)
        commands = self._endings.give_up_at(lost, reason, now)
        self._admission.on_worker_lost(lost, now)
        return commands

    # -- time --------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[AnyCommand]:
        return [
            *self._timeouts.on_tick(now),
            *self._admission.on_tick(now),
            *self._kvstores.on_tick(now),
            *self._change_roles(self._role_balancer.on_tick(now)),
        ]

    def _change_roles(self, changes: list[RoleChange]) -> list[AnyCommand]:
        """Tell workers to change their roles."""
        return [
            command
            for change in changes
            for command in send_if_live(
                self.cluster, change.worker_id, ChangeRole(role=change.to, reason=change.reason)
            )
        ]

    def check(self) -> None:
        """Audit everything that is held."""
        self.cluster.check()
        self.costs.check()
        self._role_balancer.check()
        self._kvstores.check()
        self._table.check()
        self._admission.check()
        self._log.check()
        if self._bounds is not None:
            self._bounds.check()


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
