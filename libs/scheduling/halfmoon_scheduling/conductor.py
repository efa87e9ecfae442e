"""The conductor's state machine: events in, commands out.

It owns no clock, socket, task or dice: the same events at the same times give the same
commands. Handlers stand in the order in which a request meets them. Rules throughout:

- A request ends once: by `RequestFinished` or `RequestCancelled` from outside, or by one
  `Reject`, `Fail`, `Resubmit`, or `Deliver` that is final.
- Nothing is sent to a worker that is not here (`_send` sees to it).
- Whatever a request holds is in `Cluster`'s books until `_release` takes it out.
- Retries (attempt 2 and on) are never rejected: their stream has begun, so they wait or fail.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from typing import assert_never

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import (
    AnyMessage,
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ReserveDecode,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    Welcome,
    WorkerInfo,
)
from halfmoon_scheduling import admission
from halfmoon_scheduling.cluster import Cluster, UnfitWorker
from halfmoon_scheduling.commands import (
    AnyCommand,
    Deliver,
    Fail,
    RefuseWorker,
    Reject,
    Resubmit,
    Send,
)
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.cost_model import CostModel
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.limits import TooLong
from halfmoon_scheduling.placement import Job, Placement
from halfmoon_scheduling.placer import Placer
from halfmoon_scheduling.prefix_index import KvFollower, PrefixIndex
from halfmoon_scheduling.request_state import Decision, Phase, Stopping, Tracked

#: Seconds after which a refused client may try again when nothing better is known.
RETRY_S = 1.0

_Commands = list[AnyCommand]


class Conductor:
    """Places requests on workers and follows them until they are over."""

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config
        self.costs = CostModel(prior_bandwidth=config.prior_bandwidth)
        self.cluster = Cluster(self.costs, block_size=config.block_size)
        self.index = PrefixIndex()
        self._placer = Placer(config, self.cluster, self.index, self.costs)
        #: Recent placements with their tables, the newest last.
        self.decisions: deque[Decision] = deque(maxlen=config.kept_decisions)
        self._follower = KvFollower(self.index)
        #: All requests that are not over.
        self._requests: dict[RequestId, Tracked] = {}
        #: (sequence, id) of those in phase WAITING, sorted.
        self._waiting: list[tuple[int, RequestId]] = []
        #: Disjoint from `_requests`.
        self._stopping: dict[RequestId, Stopping] = {}
        self._n_arrived = 0
        #: Whether this event may have made room for those who wait.
        self._room_made = False

    # -- what the metrics show ---------------------------------------------------------------

    @property
    def n_requests(self) -> dict[str, int]:
        """Requests by phase, and under "stopping" those over that a prefill may still write."""
        counts = Counter(tracked.phase for tracked in self._requests.values())
        return {phase.value: counts[phase] for phase in Phase} | {"stopping": len(self._stopping)}

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Where a request is; None when it is over or unknown."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.phase

    # -- the one entrance --------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take in one fact and say what to do, in this order.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.
        """
        self._room_made = False
        commands = self._dispatch(event, now)
        if self._room_made:
            commands += self._place_waiting(now)
        return commands

    def _dispatch(self, event: AnyEvent, now: float) -> _Commands:
        match event:
            case RequestArrived():
                return self._on_request_arrived(event.request, now)
            case RequestCancelled():
                return self._on_request_cancelled(event.request_id, now)
            case RequestFinished():
                return self._on_request_finished(event.request_id, now)
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

    def _on_message(self, worker_id: WorkerId, message: AnyMessage, now: float) -> _Commands:
        if isinstance(message, Welcome):
            return self._on_worker_joined(message.worker, now)
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
                self.cluster.on_decode_load(worker_id, message)
                self._room_made = True
            case PrefillLoad():
                self.cluster.on_prefill_load(worker_id, message)
            case BlocksSnapshot():
                return self._on_blocks_snapshot(worker_id, message, now)
            case _:
                pass  # tokens skip the core, and the rest is between other parties
        return []

    # -- arrival, placement, waiting ---------------------------------------------------------

    def _on_request_arrived(self, request: Request, now: float) -> _Commands:
        if request.request_id in self._requests or request.request_id in self._stopping:
            return []
        self._n_arrived += 1
        deadline_s = now + self.config.request_timeout_s
        tracked = Tracked(request, self._n_arrived, now, deadline_s)
        self._requests[request.request_id] = tracked
        # Nobody overtakes those who wait, or a long prompt would wait for ever.
        return self._seek(tracked, now, may_reserve=not self._waiting)

    def _seek(self, tracked: Tracked, now: float, *, may_reserve: bool) -> _Commands:
        """Reserve, wait, or refuse: for a request that holds nothing."""
        request = tracked.request
        for role in ("prefill", "decode"):
            if not self.cluster.accepting(role):
                reason = f"no {role} worker is live that takes requests"
                return self._refuse(tracked, Reject(request.request_id, "unavailable", reason, 1.0))
        try:
            placement, job = self._placer.place(request, tracked.refused_by, now)
        except TooLong as error:
            return self._refuse(tracked, Reject(request.request_id, "too_long", str(error)))
        if not tracked.is_retry:
            refused = admission.decide(
                self.config.admission,
                placement,
                ttft_slo_s=self._ttft_slo_s(request),
                tbt_slo_s=_first(request.tbt_slo_s, self.config.tbt_slo_s),
                waited_s=now - tracked.arrived_s,
            )
            if refused is not None:
                return self._overloaded(tracked, refused.reason, refused.retry_after_s)
        if placement.decode is None or not may_reserve:
            return self._wait(tracked)
        return self._reserve(tracked, placement, placement.decode, job, now)

    def _wait(self, tracked: Tracked) -> _Commands:
        entry = (tracked.sequence, tracked.request_id)
        tracked.phase = Phase.WAITING
        tracked.placement = None
        tracked.deadline_s = tracked.arrived_s + self._patience_s(tracked)
        tracked.refused_by.clear()
        if entry in self._waiting:
            return []
        # Retries are not turned away: they are no more than the decode workers held.
        if len(self._waiting) >= self.config.max_waiting and not tracked.is_retry:
            reason = f"{len(self._waiting)} requests wait for decode pages, which is the limit"
            return self._overloaded(tracked, reason)
        insort(self._waiting, entry)
        return []

    def _place_waiting(self, now: float) -> _Commands:
        """Serve those who wait, first come first served, until one has to go on waiting."""
        commands: _Commands = []
        while self._waiting:
            _, request_id = self._waiting[0]
            commands += self._seek(self._requests[request_id], now, may_reserve=True)
            if self._waiting and self._waiting[0][1] == request_id:
                break
        return commands

    def _reserve(
        self, tracked: Tracked, placement: Placement, decode: WorkerId, job: Job, now: float
    ) -> _Commands:
        self._stop_waiting(tracked)
        request = tracked.request
        self.cluster.plan(placement.chosen, decode, job, now)
        tracked.phase = Phase.RESERVING
        tracked.placement = placement
        tracked.deadline_s = now + self.config.reserve_timeout_s
        self.decisions.append(Decision(request.request_id, request.attempt, now, placement))
        message = ReserveDecode(
            request_id=request.request_id,
            n_tokens=job.n_tokens,
            stopping=request.stopping,
        )
        return self._send(decode, message)

    # -- reservation -------------------------------------------------------------------------

    def _on_decode_reserved(
        self, worker_id: WorkerId, message: DecodeReserved, now: float
    ) -> _Commands:
        tracked = self._requests.get(message.request_id)
        if tracked is None or tracked.decode != worker_id:
            stopping = self._stopping.get(message.request_id)
            if stopping is not None and stopping.decode == worker_id:
                return []  # said twice; it is cancelled when prefill has stopped
            return self._send(worker_id, Cancel(request_id=message.request_id))
        if tracked.phase is not Phase.RESERVING:
            return []
        placement = tracked.placement
        assert placement is not None
        chosen, request = placement.chosen, tracked.request
        self.cluster.landed(worker_id, message.request_id, "landing")
        tracked.phase = Phase.PREFILLING
        tracked.deadline_s = now + self.config.request_timeout_s
        cached = None
        if chosen.source is not None and chosen.source in self.cluster:
            cached = CachedPrefix(self.cluster.address(chosen.source), chosen.n_blocks)
        home = self._placer.store_for(request.request_id, chosen.worker_id)
        return self._send(
            chosen.worker_id,
            StartPrefill(
                request_id=message.request_id,
                token_ids=request.token_ids,
                n_prompt=request.n_prompt,
                block_hashes=request.block_hashes,
                landing=message.landing,
                landing_expires_s=max(
                    message.expires_s - self.config.landing_margin_s, message.expires_s / 2
                ),
                sampling=request.sampling,
                stopping=request.stopping,
                cached=cached,
                store_in=None if home is None else self.cluster.address(home),
            ),
        )

    def _on_decode_refused(
        self, worker_id: WorkerId, message: DecodeRefused, now: float
    ) -> _Commands:
        tracked = self._requests.get(message.request_id)
        if tracked is None or tracked.decode != worker_id or tracked.phase is not Phase.RESERVING:
            return []
        if not message.retryable:
            self._release(tracked, now)
            reason = f"{worker_id}: {message.reason}"
            return self._refuse(tracked, Reject(message.request_id, "too_long", reason))
        return self._try_elsewhere(tracked, worker_id, now + message.retry_after_s, now)

    def _try_elsewhere(
        self, tracked: Tracked, decode: WorkerId, full_until_s: float, now: float
    ) -> _Commands:
        """`decode` has no room, or does not answer: another one, or wait."""
        self._release(tracked, now)
        self.cluster.refused(decode, full_until_s)
        tracked.refused_by.add(decode)
        return self._seek(tracked, now, may_reserve=True)

    # -- prefill -----------------------------------------------------------------------------

    def _on_prefill_done(self, worker_id: WorkerId, message: PrefillDone, now: float) -> _Commands:
        tracked = self._prefilling_at(worker_id, message.request_id)
        if tracked is None:
            return self._on_prefill_stopped(worker_id, message.request_id)
        assert tracked.placement is not None and tracked.placement.decode is not None
        decode, request = tracked.placement.decode, tracked.request
        self._placer.learn(tracked.placement, request, message)
        self.cluster.release_prefill(worker_id, request.request_id, now)
        commands: _Commands = [
            Deliver(request.request_id, message.first_token, message.finish, message.n_cached)
        ]
        if message.finish:
            self._end(tracked, now)
            self._placer.forget(message.request_id)
            return commands + self._send(decode, Cancel(request_id=request.request_id))
        self.cluster.landed(decode, request.request_id, "running")
        tracked.phase = Phase.DECODING
        tracked.deadline_s = float("inf")
        return commands + self._send(
            decode,
            StartDecode(
                request_id=request.request_id,
                first_token=message.first_token,
                sampling=request.sampling,
                stopping=request.stopping,
                n_prompt=request.n_prompt,
                history=request.token_ids if request.sampling.needs_history else (),
            ),
        )

    def _on_prefill_failed(
        self, worker_id: WorkerId, message: PrefillFailed, now: float
    ) -> _Commands:
        tracked = self._prefilling_at(worker_id, message.request_id)
        if tracked is None:
            return self._on_prefill_stopped(worker_id, message.request_id)
        assert tracked.decode is not None
        commands = self._send(tracked.decode, Cancel(request_id=message.request_id))
        culprit = self.cluster.get(message.culprit) if message.culprit is not None else None
        if culprit is not None and culprit.role == "kvstore":
            self._placer.avoid(message.request_id, culprit.worker_id)
        reason = f"prefill at {worker_id} failed: {message.reason}"
        commands += self._again(tracked, reason, now, retryable=message.retryable)
        if culprit is not None and self._follower.distrust(culprit.worker_id, now):
            commands += self._send(culprit.worker_id, SnapshotBlocks())
        return commands

    def _on_prefill_stopped(self, worker_id: WorkerId, request_id: RequestId) -> _Commands:
        """Nothing more is written: decode may free the landing of a request given up."""
        stopping = self._stopping.get(request_id)
        if stopping is None or stopping.prefill != worker_id:
            return []
        return self._free_landing(request_id, stopping, in_doubt=False)

    def _prefilling_at(self, worker_id: WorkerId, request_id: RequestId) -> Tracked | None:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.PREFILLING or tracked.prefill != worker_id:
            return None
        return tracked

    # -- decode ------------------------------------------------------------------------------

    def _on_decode_failed(
        self, worker_id: WorkerId, message: DecodeFailed, now: float
    ) -> _Commands:
        tracked = self._requests.get(message.request_id)
        if tracked is None or tracked.decode != worker_id:
            stopping = self._stopping.get(message.request_id)
            if stopping is not None and stopping.decode == worker_id:
                del self._stopping[message.request_id]
                self.cluster.release_decode(worker_id, message.request_id)
            return []
        self.cluster.release_decode(worker_id, message.request_id)
        commands: _Commands = []
        if tracked.phase is Phase.PREFILLING and tracked.prefill is not None:
            commands = self._send(tracked.prefill, Cancel(request_id=message.request_id))
        reason = f"decode at {worker_id} failed: {message.reason}"
        return commands + self._again(tracked, reason, now, retryable=message.retryable)

    def _on_request_finished(self, request_id: RequestId, now: float) -> _Commands:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.DECODING:
            return self._on_request_cancelled(request_id, now)
        self._end(tracked, now)  # decode freed its pages with the last token
        self._placer.forget(request_id)
        return []

    def _on_request_cancelled(self, request_id: RequestId, now: float) -> _Commands:
        tracked = self._requests.get(request_id)
        return [] if tracked is None else self._give_up(tracked, now)

    # -- workers -----------------------------------------------------------------------------

    def _on_worker_joined(self, info: WorkerInfo, now: float) -> _Commands:
        known = self.cluster.get(info.worker_id)
        commands: _Commands = []
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
        self._room_made = True
        if info.role == "kvstore" and known is None and self._follower.joined(info.worker_id, now):
            commands += self._send(info.worker_id, SnapshotBlocks())
        return commands

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now: float) -> _Commands:
        if worker_id not in self.cluster:
            return []
        self.cluster.leave(worker_id)
        self._follower.lost(worker_id)
        commands: _Commands = []
        for request_id, stopping in list(self._stopping.items()):
            if worker_id == stopping.decode:
                del self._stopping[request_id]
            elif worker_id == stopping.prefill:
                commands += self._free_landing(request_id, stopping, in_doubt=True)
        for tracked in self._in_order():
            on_prefill = tracked.prefill == worker_id and tracked.phase is not Phase.DECODING
            if on_prefill or tracked.decode == worker_id:
                commands += self._give_up(tracked, now, because=f"{worker_id} is lost: {reason}")
        # Nobody may be left who could serve those who wait: they are to hear it.
        self._room_made = True
        return commands

    def _on_kv_changed(self, worker_id: WorkerId, batch: KvEventBatch, now: float) -> _Commands:
        if self._follower.changed(worker_id, batch, now):
            return self._send(worker_id, SnapshotBlocks())
        return []

    def _on_blocks_snapshot(
        self, worker_id: WorkerId, message: BlocksSnapshot, now: float
    ) -> _Commands:
        if self._follower.snapshot(worker_id, message.sequence, message.hashes, now):
            return self._send(worker_id, SnapshotBlocks())
        return []

    # -- time --------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> _Commands:
        commands: _Commands = []
        for tracked in self._in_order():
            if tracked.deadline_s <= now:
                commands += self._on_deadline(tracked, now)
        for request_id, stopping in list(self._stopping.items()):
            if stopping.deadline_s <= now:
                commands += self._free_landing(request_id, stopping, in_doubt=True)
        for worker_id in self._follower.overdue(now, self.config.snapshot_timeout_s):
            commands += self._send(worker_id, SnapshotBlocks())
        self._room_made = True
        return commands

    def _on_deadline(self, tracked: Tracked, now: float) -> _Commands:
        if tracked.phase is Phase.WAITING:
            waited_s = now - tracked.arrived_s
            return self._overloaded(tracked, f"no decode pages came free in {waited_s:.3g} s")
        assert tracked.decode is not None, "it is reserving or prefilling"
        if tracked.phase is Phase.RESERVING:
            decode = tracked.decode
            commands = self._send(decode, Cancel(request_id=tracked.request_id))
            full_until_s = now + self.config.reserve_timeout_s
            return commands + self._try_elsewhere(tracked, decode, full_until_s, now)
        return self._give_up(
            tracked,
            now,
            because=f"{tracked.prefill} did not finish in {self.config.request_timeout_s} s",
        )

    # -- endings -----------------------------------------------------------------------------

    def _give_up(self, tracked: Tracked, now: float, *, because: str = "") -> _Commands:
        """Cancel what a request holds on live workers, and end it; try again if `because`."""
        request_id = tracked.request_id
        prefill, decode, phase = tracked.prefill, tracked.decode, tracked.phase
        cancel = Cancel(request_id=request_id)
        commands: _Commands = []
        keep_decode = False
        if phase is Phase.PREFILLING and prefill is not None and prefill in self.cluster:
            assert decode is not None
            commands += self._send(prefill, cancel)
            keep_decode = decode in self.cluster
            if keep_decode:
                deadline_s = now + self.config.reserve_timeout_s
                self._stopping[request_id] = Stopping(prefill, decode, deadline_s)
        elif phase is not Phase.WAITING:
            assert decode is not None
            in_doubt = phase is Phase.PREFILLING
            commands += self._send(decode, Cancel(request_id=request_id, landing_in_doubt=in_doubt))
        if because:
            return commands + self._again(
                tracked, because, now, retryable=True, keep_decode=keep_decode
            )
        self._end(tracked, now, keep_decode=keep_decode)
        self._placer.forget(request_id)
        return commands

    def _again(
        self,
        tracked: Tracked,
        reason: str,
        now: float,
        *,
        retryable: bool,
        keep_decode: bool = False,
    ) -> _Commands:
        """End this try; another one follows if it may help and is allowed."""
        self._end(tracked, now, keep_decode=keep_decode)
        attempt, allowed = tracked.request.attempt, self.config.max_attempts
        if retryable and attempt < allowed:
            return [Resubmit(tracked.request_id, reason)]
        self._placer.forget(tracked.request_id)
        if retryable:
            reason = f"{reason} (try {attempt} of {allowed})"
        return [Fail(tracked.request_id, reason)]

    def _refuse(self, tracked: Tracked, reject: Reject) -> _Commands:
        """End a request that holds nothing; a retry, whose stream has begun, fails instead."""
        self._stop_waiting(tracked)
        del self._requests[tracked.request_id]
        self._placer.forget(tracked.request_id)
        return [Fail(tracked.request_id, reject.reason) if tracked.is_retry else reject]

    def _overloaded(
        self, tracked: Tracked, reason: str, retry_after_s: float = RETRY_S
    ) -> _Commands:
        return self._refuse(
            tracked, Reject(tracked.request_id, "overloaded", reason, retry_after_s)
        )

    def _free_landing(
        self, request_id: RequestId, stopping: Stopping, *, in_doubt: bool
    ) -> _Commands:
        del self._stopping[request_id]
        self.cluster.release_decode(stopping.decode, request_id)
        self._room_made = True
        return self._send(stopping.decode, Cancel(request_id=request_id, landing_in_doubt=in_doubt))

    def _end(self, tracked: Tracked, now: float, *, keep_decode: bool = False) -> None:
        """The request is over; with `keep_decode` a `Stopping` has its landing now."""
        self._stop_waiting(tracked)
        self._release(tracked, now, keep_decode=keep_decode)
        del self._requests[tracked.request_id]
        self._room_made = True

    def _release(self, tracked: Tracked, now: float, *, keep_decode: bool = False) -> None:
        """Take a request's claims out of the books."""
        if tracked.prefill is not None:
            self.cluster.release_prefill(tracked.prefill, tracked.request_id, now)
        if tracked.decode is not None and not keep_decode:
            self.cluster.release_decode(tracked.decode, tracked.request_id)

    def _stop_waiting(self, tracked: Tracked) -> None:
        entry = (tracked.sequence, tracked.request_id)
        if tracked.phase is Phase.WAITING and entry in self._waiting:
            self._waiting.remove(entry)

    # -- helpers -----------------------------------------------------------------------------

    def _send(self, worker_id: WorkerId, message: AnyMessage) -> _Commands:
        return [Send(worker_id, message)] if worker_id in self.cluster else []

    def _in_order(self) -> Iterable[Tracked]:
        """Requests in the order of their arrival; safe to change them meanwhile."""
        return list(self._requests.values())

    def _ttft_slo_s(self, request: Request) -> float | None:
        return _first(request.ttft_slo_s, self.config.ttft_slo_s)

    def _patience_s(self, tracked: Tracked) -> float:
        """How long it may wait for pages, from its arrival."""
        slo_s = self._ttft_slo_s(tracked.request)
        if self.config.admission == "none" or tracked.is_retry or slo_s is None:
            return self.config.request_timeout_s
        return min(slo_s, self.config.request_timeout_s)

    def check(self) -> None:
        """Audit: phases, books and queues tell one story, and only of live workers."""
        self.cluster.check()
        self.index.check()
        self._follower.check()
        self.costs.check()
        assert self._waiting == sorted(self._waiting)
        waiting = {t.request_id for t in self._requests.values() if t.phase is Phase.WAITING}
        assert {request_id for _, request_id in self._waiting} == waiting
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
            assert stopping.prefill in self.cluster
            held.setdefault(stopping.decode, set()).add(request_id)
        for info in self.cluster.workers():
            if info.role == "prefill":
                expected = planned.pop(info.worker_id, set())
                assert self.cluster.planned_requests(info.worker_id) == expected
            elif info.role == "decode":
                expected = held.pop(info.worker_id, set())
                assert self.cluster.held_requests(info.worker_id) == expected
        assert not planned and not held, "a request is on a worker that is not here"


def _first(own: float | None, default: float | None) -> float | None:
    return default if own is None else own
