"""Observe the core: record its events and commands in the histories."""

from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.prefix_usage import PrefixUseCounter
from halfmoon_conductor.observability.history.request_history import RequestHistory
from halfmoon_conductor.observability.history.worker_history import WorkerHistory
from halfmoon_protocol.messages import PrefillDone, WorkerInfo
from halfmoon_scheduling.commands import AnyCommand, RefuseWorker, Resubmit
from halfmoon_scheduling.conductor.conductor_machine import Conductor
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


class CoreObserver:
    """Observe the core: the shell calls `record` with every event after it was handled."""

    def __init__(self, core: Conductor, latencies: LatencyHistory) -> None:
        self.core = core
        self.latencies = latencies
        self.workers = WorkerHistory()
        # Twice as many: some tries end without a decision, as they were late or never placed.
        self.requests = RequestHistory(kept=2 * core.config.kept_decisions)
        self.prefixes = PrefixUseCounter(core.config.replication_half_life_s)

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Record one call of the core."""
        if self.requests.activity.is_over(now):
            self.requests.activity.begin(now, self.core.n_requests)
        match event:
            case Tick():
                pass
            case MessageReceived(worker_id=worker_id, message=message):
                self.workers.on_report(worker_id, message, now)
                if isinstance(message, PrefillDone):
                    self._on_prefill_done(message)
            case KvChanged(worker_id=worker_id):
                self.workers.on_report(worker_id, None, now)
            case RequestArrived(request=request):
                self._on_arrival(request, now)
            case RequestFinished(request_id=request_id, n_new=n_new):
                self.requests.on_end(request_id, "finished", now, n_new=n_new)
            case RequestCancelled(request_id=request_id):
                self.requests.on_end(request_id, "cancelled", now)
            case WorkerJoined(worker=info):
                self._on_joined(info, commands, now)
            case WorkerLost(worker_id=worker_id, reason=reason):
                n_placed_again = sum(isinstance(command, Resubmit) for command in commands)
                self.workers.on_left(worker_id, reason, now, n_placed_again)
        if commands:
            self.requests.on_commands(commands, now)

    def _on_joined(self, info: WorkerInfo, commands: list[AnyCommand], now: float) -> None:
        refused = [command for command in commands if isinstance(command, RefuseWorker)]
        if refused:
            self.workers.on_left(info.worker_id, refused[0].reason, now)
        else:
            self.workers.on_joined(info, now)

    def _on_arrival(self, request: Request, now: float) -> None:
        self.requests.on_arrival(request, now)
        lengths = self.core.index.longest_prefix(request.block_hashes)
        if lengths:
            known = request.block_hashes[: max(lengths.values())]
            self.prefixes.on_use(known, request.request_id, now)

    def _on_prefill_done(self, done: PrefillDone) -> None:
        decision = next(
            (d for d in reversed(self.core.decisions) if d.request_id == done.request_id), None
        )
        layout = self.core.cluster.layout
        if decision is None or layout is None:
            self.requests.on_prefill_done(done, None, 0)
            return
        chosen = decision.placement.chosen
        n_transferred = chosen.transfer_blocks * layout.block_size
        self.requests.on_prefill_done(done, chosen.source, n_transferred)
