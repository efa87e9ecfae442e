"""The conductor's state machine: events in, commands out.

It owns no clock, socket, task or dice: the same events at the same times give the same
commands. What a fact means for one request's life is in `lifecycle`; here facts are told
apart, late and foreign ones are dropped, and workers come and go. Handlers stand in the order
in which a request meets them.
"""

from collections import Counter, deque
from collections.abc import Collection
from typing import NamedTuple, assert_never

import msgspec

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
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
    DropBlocks,
    KvstoreLoad,
    KvstoreRefused,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ReplicateBlocks,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    ToConductor,
    TokensProduced,
    Welcome,
    WorkerInfo,
)
from halfmoon_scheduling.cluster.cluster_state import Cluster, UnfitWorker
from halfmoon_scheduling.cluster.role_balancer import RoleBalancer
from halfmoon_scheduling.commands import AnyCommand, Deliver, RefuseWorker
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.prediction_error import PredictionErrors
from halfmoon_scheduling.conductor.request_lifecycle import RequestLifecycle
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory.prefix_index import KvEventFollower, PrefixIndex
from halfmoon_scheduling.directory.replication import CopyPrefix, DropCopies, Replicator
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestProgressed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.requests.landing_validation import landing_fault
from halfmoon_scheduling.requests.request_state import Decision, Phase, RequestState

#: Seconds between two looks at what is hot.
REPLICATION_PERIOD_S = 1.0
#: Seconds for which a kvstore that refused a copy is left alone at the least.
REFUSED_COPY_S = 10.0


class PoolLoads(NamedTuple):
    """How busy the pools are: times over their limits, or seconds where there is no limit."""

    prefill: float
    decode: float


class Conductor:
    """Places requests on workers and follows them until they are over."""

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config
        self.costs = CostModel(prior_bandwidth=config.prior_bandwidth)
        self.cluster = Cluster(
            self.costs, block_size=config.block_size, decode_time_s=config.decode_time_s
        )
        self.index = PrefixIndex()
        self._follower = KvEventFollower(self.index)
        self._placer = Placer(config, self.cluster, self.index, self.costs)
        self._replicator: Replicator | None = None
        if config.replication_bytes_per_s:
            self._replicator = Replicator(
                config.replication_bytes_per_s,
                config.replication_hot_uses,
                config.replication_half_life_s,
            )
        self._replicated_s = float("-inf")
        self._role_changes = RoleBalancer(config, self.cluster) if config.role_changes else None
        self._requests = RequestLifecycle(config, self.cluster, self._placer, self._replicator)

    # -- what the metrics show ---------------------------------------------------------------

    @property
    def n_requests(self) -> dict[str, int]:
        """Requests by phase, and under "stopping" those over that a prefill may still write."""
        return self._requests.counts

    @property
    def decisions(self) -> deque[Decision]:
        """Recent placements with the tables that explain them, the newest last."""
        return self._requests.decisions

    @property
    def refusals(self) -> Counter[str]:
        """Requests refused, by what was lacking: "ttft", "tbt" and "tbt_late" (limits that
        would be missed), "pages", "queue_full", "too_long", "unavailable", "harmful",
        "quarantine"."""
        return self._requests.refusals

    @property
    def following(self) -> KvEventFollower:
        """How well the index follows the kvstores."""
        return self._follower

    @property
    def prediction_errors(self) -> PredictionErrors:
        """How true predictions came."""
        return self._requests.prediction_errors

    def loads(self, now: float) -> PoolLoads:
        """How busy both pools are, as means of their workers' times over the limits."""
        ttft_slo_s, tbt_slo_s = self.config.ttft_slo_s, self.config.tbt_slo_s
        return PoolLoads(
            _mean(self.cluster.prefills.queues_s(now).values()) / (ttft_slo_s or 1.0),
            _mean(self.cluster.decodes.loads_s().values()) / (tbt_slo_s or 1.0),
        )

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Where a request is; None when it is over or unknown."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.phase

    def n_tokens_of(self, request_id: RequestId) -> int:
        """Tokens of a request's prompt, those of earlier tries included; 0 when it is over."""
        tracked = self._requests.get(request_id)
        return 0 if tracked is None else len(tracked.request.token_ids)

    def decodes_at(self, request_id: RequestId) -> WorkerId | None:
        """The decode worker whose tokens a request waits for; None: no worker's."""
        tracked = self._requests.get(request_id)
        return tracked.decode if tracked and tracked.phase is Phase.DECODING else None

    def holds_at(self, request_id: RequestId) -> WorkerId | None:
        """The decode worker where a request holds pages, or still does though it is over."""
        if (tracked := self._requests.get(request_id)) is not None:
            return tracked.decode
        stopping = self._requests.stopping(request_id)
        return None if stopping is None else stopping.decode

    def prefill_of(self, request_id: RequestId) -> WorkerId | None:
        """The prefill worker of a request that is placed and not over."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.prefill

    # -- the one entrance --------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take in one fact and say what to do, in this order.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.
        """
        commands = self._dispatch(event, now)
        if self._requests.room_may_have_grown:
            for tracked, done in self._requests.late_admission.ready(now):
                commands = commands + self._go_on(tracked, done, now)
            self._requests.room_may_have_grown = False
        return commands + self._requests.place_waiting(now)

    def _dispatch(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        match event:
            case RequestArrived():
                return self._requests.arrive(event.request, now)
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
                return self._on_kv_changed(event.worker_id, event.batch, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    def _on_message(
        self, worker_id: WorkerId, message: ToConductor, now: float
    ) -> list[AnyCommand]:
        if isinstance(message, Welcome):
            # A worker speaks for itself alone.
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
                return self._on_prefill_stopped(worker_id, message.request_id)
            case DecodeFailed():
                return self._on_decode_failed(worker_id, message, now)
            case DecodeLoad():
                return self._on_decode_load(worker_id, message)
            case PrefillLoad():
                self.cluster.prefills.on_load(worker_id, message)
                return []
            case BlocksReplicated() | KvstoreRefused():
                return self._on_copy_answered(worker_id, message, now)
            case KvstoreLoad():
                missed = self._follower.told(worker_id, message.sequence, now)
                return self._requests.send(worker_id, SnapshotBlocks()) if missed else []
            case BlocksSnapshot():
                return self._on_blocks_snapshot(worker_id, message, now)
            case TokensProduced():
                return []  # tokens skip the core
            case _:
                assert_never(message)

    def _on_decode_load(self, worker_id: WorkerId, load: DecodeLoad) -> list[AnyCommand]:
        self.cluster.decodes.on_load(worker_id, load)
        self._requests.late_admission.stir(worker_id)
        self._requests.room_may_have_grown = True
        return []

    def _on_copy_answered(
        self, worker_id: WorkerId, answer: BlocksReplicated | KvstoreRefused, now: float
    ) -> list[AnyCommand]:
        """Note what became of an ordered copy of hot blocks."""
        if self._replicator is not None:
            if isinstance(answer, BlocksReplicated):
                self._replicator.copied(worker_id, answer.ticket, answer.n_blocks)
            else:
                until_s = now + max(answer.retry_after_s, REFUSED_COPY_S)
                self._replicator.refused(worker_id, answer.ticket, until_s)
        return []

    # -- reservation -------------------------------------------------------------------------

    def _on_decode_reserved(
        self, worker_id: WorkerId, message: DecodeReserved, now: float
    ) -> list[AnyCommand]:
        request_id = message.request_id
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.decode != worker_id:
            stopping = self._requests.stopping(request_id)
            if stopping is not None and stopping.decode == worker_id:
                return []  # said twice; it is cancelled when prefill has stopped
            return self._requests.send(worker_id, Cancel(request_id=request_id))
        if tracked.phase is not Phase.RESERVING:
            return []
        assert tracked.placement is not None
        if landing_fault(message, len(tracked.request.token_ids), self.cluster.layout):
            full_until_s = now + self.config.reserve_timeout_s
            commands = self._requests.send(worker_id, Cancel(request_id=request_id))
            return commands + self._requests.try_elsewhere(tracked, worker_id, full_until_s, now)
        chosen, request = tracked.placement.chosen, tracked.request
        self.cluster.decodes.landing(worker_id, request_id)
        if chosen.workers:
            self.cluster.prefills.start(chosen.worker_id, request_id, now)
        tracked.phase = Phase.PREFILLING
        self._requests.deadlines.set(tracked, now + self.config.request_timeout_s)
        writing_s = self._writing_s(message.expires_s, now - tracked.asked_s)
        tracked.landing_ends_s = now + writing_s
        cached = None
        if sources := self._placer.sources(tracked.placement, request):
            first, *others = map(self.cluster.address, sources)
            cached = CachedPrefix(first, chosen.n_blocks, tuple(others))
        home = self._placer.store_for(request_id, chosen)
        message_out = StartPrefill(
            request_id=request_id,
            token_ids=request.token_ids,
            n_prompt=request.n_prompt,
            block_hashes=request.block_hashes,
            landing=message.landing,
            landing_expires_s=writing_s,
            sampling=request.sampling,
            stopping=request.stopping,
            cached=cached,
            store_in=None if home is None else self.cluster.address(home),
            stages=tuple(self.cluster.stage_address(stage) for stage in chosen.workers[1:]),
            priority=request.priority,
            tenant=request.tenant,
        )
        return self._requests.send(chosen.worker_id, message_out)

    def _writing_s(self, expires_s: float, asked_for_s: float) -> float:
        """How long prefill may write to a landing.

        The landing is no older than the question for it, so that long is surely over; the
        margin is for messages on their way, but at most half of the landing's time.
        """
        margin_s = min(self.config.landing_margin_s, expires_s / 2)
        return max(0.0, expires_s - asked_for_s - margin_s)

    def _on_decode_refused(
        self, worker_id: WorkerId, message: DecodeRefused, now: float
    ) -> list[AnyCommand]:
        tracked = self._requests.get(message.request_id)
        if tracked is None or tracked.decode != worker_id or tracked.phase is not Phase.RESERVING:
            return []
        if not message.retryable:
            reason = f"{worker_id}: {message.reason}"
            return self._requests.refuse_permanently(tracked, reason, now)
        full_until_s = now + message.retry_after_s
        return self._requests.try_elsewhere(tracked, worker_id, full_until_s, now)

    # -- prefill -----------------------------------------------------------------------------

    def _on_prefill_done(
        self, worker_id: WorkerId, message: PrefillDone, now: float
    ) -> list[AnyCommand]:
        self._answered(worker_id, now)
        tracked = self._prefilling_at(worker_id, message.request_id)
        if tracked is None:
            return self._on_prefill_stopped(worker_id, message.request_id)
        assert tracked.placement is not None and tracked.placement.decode is not None
        if message.n_cached >= len(tracked.request.token_ids):  # at least one was computed
            message = msgspec.structs.replace(message, n_cached=0)
        self._placer.learn(tracked.placement, tracked.request, message, now)
        self._requests.prediction_errors.observe(
            "ttft", tracked.first_token_s - tracked.arrived_s, now - tracked.arrived_s
        )
        self._requests.prediction_errors.prefilled(tracked.placement.chosen, message)
        if not message.finish:
            held_up = self._requests.admit_late(tracked, message, now)
            if held_up is not None:
                return held_up
        return self._go_on(tracked, message, now)

    def _go_on(self, tracked: RequestState, done: PrefillDone, now: float) -> list[AnyCommand]:
        """The first token is due, and what follows it."""
        request, decode = tracked.request, tracked.decode
        assert decode is not None
        commands: list[AnyCommand] = [
            Deliver(request.request_id, done.first_token, done.finish, done.n_cached)
        ]
        if done.finish:
            self._requests.end(tracked, now)
            self._placer.forget(request.request_id)
            return commands + self._requests.send(decode, Cancel(request_id=request.request_id))
        self._requests.decoding(tracked, now)
        start = StartDecode(
            request_id=request.request_id,
            first_token=done.first_token,
            sampling=request.sampling,
            stopping=request.stopping,
            n_prompt=request.n_prompt,
            history=request.token_ids if request.sampling.needs_history else (),
        )
        return commands + self._requests.send(decode, start)

    def _on_prefill_failed(
        self, worker_id: WorkerId, message: PrefillFailed, now: float
    ) -> list[AnyCommand]:
        self._answered(worker_id, now)
        tracked = self._prefilling_at(worker_id, message.request_id)
        if tracked is None:
            return self._on_prefill_stopped(worker_id, message.request_id)
        assert tracked.decode is not None
        commands = self._requests.send(tracked.decode, Cancel(request_id=message.request_id))
        if not message.invalid:
            self._placer.avoid(message.request_id, message.culprit or worker_id)
            self._requests.on_workers_changed()
        culprit = self.cluster.get(message.culprit) if message.culprit is not None else None
        if (
            culprit is not None
            and culprit.role == "kvstore"
            and self._follower.distrust(culprit.worker_id, now)
        ):
            commands += self._requests.send(culprit.worker_id, SnapshotBlocks())
        reason = f"prefill at {worker_id} failed: {message.reason}"
        return commands + self._requests.retry(
            tracked, reason, now, retryable=message.retryable, invalid=message.invalid
        )

    def _answered(self, worker_id: WorkerId, now: float) -> None:
        if worker_id in self.cluster.prefills:
            self.cluster.prefills.answered(worker_id, now)

    def _on_prefill_stopped(self, worker_id: WorkerId, request_id: RequestId) -> list[AnyCommand]:
        """Nothing more is written: decode may free the landing of a request given up."""
        stopping = self._requests.stopping(request_id)
        if stopping is None or stopping.prefill != worker_id:
            return []
        return self._requests.free_landing(request_id, in_doubt=False)

    def _prefilling_at(self, worker_id: WorkerId, request_id: RequestId) -> RequestState | None:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.PREFILLING or tracked.prefill != worker_id:
            return None
        return tracked

    # -- decode ------------------------------------------------------------------------------

    def _on_decode_failed(
        self, worker_id: WorkerId, message: DecodeFailed, now: float
    ) -> list[AnyCommand]:
        """Decode has let go already; prefill, if it is at it, is to stop."""
        request_id = message.request_id
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.decode != worker_id:
            stopping = self._requests.stopping(request_id)
            if stopping is not None and stopping.decode == worker_id:
                self._requests.forget_landing(request_id)
            return []
        commands: list[AnyCommand] = []
        if tracked.phase is Phase.PREFILLING and tracked.prefill is not None and tracked.writers:
            commands = self._requests.send(tracked.prefill, Cancel(request_id=request_id))
        reason = f"decode at {worker_id} failed: {message.reason}"
        return commands + self._requests.retry(
            tracked, reason, now, retryable=message.retryable, invalid=message.invalid
        )

    def _on_request_progressed(self, request_id: RequestId) -> list[AnyCommand]:
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.phase is Phase.DECODING:
            self._requests.progressed(tracked)
        return []

    def _on_request_finished(self, event: RequestFinished, now: float) -> list[AnyCommand]:
        tracked = self._requests.get(event.request_id)
        if tracked is None or tracked.phase is not Phase.DECODING:
            return self._on_request_cancelled(event.request_id, now)
        self._requests.finished(tracked, event.n_new, now)
        return []

    def _on_request_cancelled(self, request_id: RequestId, now: float) -> list[AnyCommand]:
        tracked = self._requests.get(request_id)
        return [] if tracked is None else self._requests.give_up(tracked, now)

    # -- workers -----------------------------------------------------------------------------

    def _on_worker_joined(self, info: WorkerInfo, now: float) -> list[AnyCommand]:
        known = self.cluster.get(info.worker_id)
        commands: list[AnyCommand] = []
        if known is not None:
            if info.generation < known.generation:
                return []  # late word of an earlier start
            if (info.generation, info.role) != (known.generation, known.role):
                commands += self._on_worker_lost(info.worker_id, "it was started again", now)
                known = None
        try:
            self.cluster.join(info)
        except UnfitWorker as error:
            if known is not None:
                commands += self._on_worker_lost(info.worker_id, str(error), now)
            return [*commands, RefuseWorker(info.worker_id, str(error))]
        self._requests.on_workers_changed()
        if info.role == "kvstore" and known is None and self._follower.joined(info.worker_id, now):
            commands += self._requests.send(info.worker_id, SnapshotBlocks())
        return commands

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now: float) -> list[AnyCommand]:
        if (lost := self.cluster.get(worker_id)) is None:
            return []
        self.cluster.leave(worker_id)
        self._follower.lost(worker_id)
        if self._replicator is not None:
            self._replicator.lost(worker_id)
        return self._requests.on_worker_lost(lost, reason, now)

    def _on_kv_changed(
        self, worker_id: WorkerId, batch: KvEventBatch, now: float
    ) -> list[AnyCommand]:
        if self._follower.changed(worker_id, batch, now):
            return self._requests.send(worker_id, SnapshotBlocks())
        return []

    def _on_blocks_snapshot(
        self, worker_id: WorkerId, message: BlocksSnapshot, now: float
    ) -> list[AnyCommand]:
        if self._follower.snapshot(worker_id, message.sequence, message.hashes, now):
            return self._requests.send(worker_id, SnapshotBlocks())
        return []

    # -- time --------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[AnyCommand]:
        commands = self._requests.on_tick(now)
        for worker_id in self._follower.overdue(now, self.config.snapshot_timeout_s):
            commands += self._requests.send(worker_id, SnapshotBlocks())
        return commands + self._replicate(now) + self._change_roles(now)

    def _change_roles(self, now: float) -> list[AnyCommand]:
        """Tell a worker to change sides, if one side has been short of workers for long."""
        change = None if self._role_changes is None else self._role_changes.propose(now)
        if change is None:
            return []
        message = ChangeRole(role=change.to, reason=change.reason)
        return self._requests.send(change.worker_id, message)

    def _replicate(self, now: float) -> list[AnyCommand]:
        """Ask for copies of what is hot, and for copies that are cold to be dropped."""
        layout = self.cluster.layout
        due = self._replicated_s + REPLICATION_PERIOD_S <= now
        if self._replicator is None or layout is None or not due:
            return []
        self._replicated_s = now
        room = {
            info.worker_id: max(0, info.n_blocks - self.index.n_blocks(info.worker_id))
            for info in self.cluster.accepting("kvstore")
            if info.replicates
        }
        commands: list[AnyCommand] = []
        for change in self._replicator.plan(
            self.index,
            room,
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            now=now,
        ):
            match change:
                case CopyPrefix():
                    message = ReplicateBlocks(
                        ticket=change.ticket,
                        source=self.cluster.address(change.source),
                        layout=layout,
                        hashes=change.hashes,
                        parent=change.parent,
                        token_ids=change.token_ids,
                    )
                    commands += self._requests.send(change.target, message)
                case DropCopies():
                    drop = DropBlocks(hashes=change.hashes)
                    commands += self._requests.send(change.kvstore, drop)
        return commands

    def check(self) -> None:
        """Audit everything that is held."""
        self.cluster.check()
        self.index.check()
        self._follower.check()
        self.costs.check()
        self._requests.check()
        if self._replicator is not None:
            self._replicator.check()


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
