"""Takes in what the core is told and what it says: the one who looks on."""

from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.prefix_usage import PrefixUseCounter
from halfmoon_conductor.observability.history.request_history import RequestHistory
from halfmoon_conductor.observability.history.worker_history import WorkerHistory
from halfmoon_protocol.messages import PrefillDone, WorkerInfo
from halfmoon_scheduling.commands import AnyCommand, RefuseWorker
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
    """Looks over the core's shoulder: `record` is told of every event after it was handled."""

    def __init__(self, core: Conductor, latencies: LatencyHistory) -> None:
        self.core = core
        self.latencies = latencies
        self.workers = WorkerHistory()
        # Some tries end without a decision: they were late, or were never placed.
        self.requests = RequestHistory(kept=2 * core.config.kept_decisions)
        self.prefixes = PrefixUseCounter(core.config.replication_half_life_s)

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Take in one call of the core."""
        match event:
            case Tick():
                pass
            case MessageReceived(worker_id=worker_id, message=message):
                self.workers.heard(worker_id, message, now)
                if isinstance(message, PrefillDone):
                    self._prefilled(message)
            case KvChanged(worker_id=worker_id):
                self.workers.heard(worker_id, None, now)
            case RequestArrived(request=request):
                self._arrived(request, now)
            case RequestFinished(request_id=request_id, n_new=n_new):
                self.requests.ended(request_id, "finished", now, n_new=n_new)
            case RequestCancelled(request_id=request_id):
                self.requests.ended(request_id, "cancelled", now)
            case WorkerJoined(worker=info):
                self._joined(info, commands, now)
            case WorkerLost(worker_id=worker_id, reason=reason):
                self.workers.left(worker_id, reason, now)
        if commands:
            self.requests.told(commands, now)

    def _joined(self, info: WorkerInfo, commands: list[AnyCommand], now: float) -> None:
        refused = [command for command in commands if isinstance(command, RefuseWorker)]
        if refused:
            self.workers.left(info.worker_id, refused[0].reason, now)
        else:
            self.workers.joined(info, now)

    def _arrived(self, request: Request, now: float) -> None:
        self.requests.arrived(request, now)
        lengths = self.core.index.longest_prefix(request.block_hashes)
        if lengths:
            known = request.block_hashes[: max(lengths.values())]
            self.prefixes.used(known, request.request_id, now)

    def _prefilled(self, done: PrefillDone) -> None:
        decision = next(
            (d for d in reversed(self.core.decisions) if d.request_id == done.request_id), None
        )
        layout = self.core.cluster.layout
        if decision is None or layout is None:
            self.requests.prefilled(done, None, 0)
            return
        chosen = decision.placement.chosen
        n_transferred = chosen.transfer_blocks * layout.block_size
        self.requests.prefilled(done, chosen.source, n_transferred)
