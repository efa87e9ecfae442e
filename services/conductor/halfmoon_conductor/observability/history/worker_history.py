"""Keep each worker's last report, the workers that left, and when workers came and went."""

from collections import OrderedDict, deque
from typing import Literal, NamedTuple

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    DecodeLoad,
    KvstoreLoad,
    PrefillLoad,
    WorkerInfo,
)

#: Most departed workers that are kept, and for how many seconds.
MAX_DEPARTED = 64
DEPARTED_KEPT_S = 600.0

#: Most events that are kept.
MAX_EVENTS = 100

AnyWorkerLoad = PrefillLoad | DecodeLoad | KvstoreLoad


class LastReport(NamedTuple):
    """The last report of one worker."""

    #: Time of its last message, seconds.
    at_s: float
    load: AnyWorkerLoad | None


class DepartedWorker(NamedTuple):
    """A worker that left, with its record at that time."""

    info: WorkerInfo
    at_s: float
    reason: str


class WorkerEvent(msgspec.Struct, frozen=True):
    """A worker that joined or left."""

    at_s: float
    kind: Literal["joined", "left"]
    worker_id: WorkerId
    role: str
    #: Why it left.
    reason: str = ""
    #: Requests that were placed again at once, as it left.
    n_placed_again: int = 0


class WorkerHistory:
    """Keep live workers' last reports, recently departed workers, and the last events."""

    def __init__(self) -> None:
        self._infos: dict[WorkerId, WorkerInfo] = {}
        #: Only of workers in `_infos`.
        self._reports: dict[WorkerId, LastReport] = {}
        #: The newest last; disjoint from `_infos`.
        self._departed: OrderedDict[WorkerId, DepartedWorker] = OrderedDict()
        #: The newest last.
        self.events: deque[WorkerEvent] = deque(maxlen=MAX_EVENTS)

    def on_joined(self, info: WorkerInfo, now: float) -> None:
        """Record that a worker is used from now on, or that its record changed."""
        known = self._infos.get(info.worker_id)
        if known is not None and known.generation != info.generation:
            del self._reports[info.worker_id]
        if known is None or known.generation != info.generation:
            self.events.append(WorkerEvent(now, "joined", info.worker_id, info.role))
        self._infos[info.worker_id] = info
        self._departed.pop(info.worker_id, None)
        self.on_report(info.worker_id, None, now)

    def on_left(
        self, worker_id: WorkerId, reason: str, now: float, n_placed_again: int = 0
    ) -> None:
        """Record that a worker is no longer used, and how many requests moved from it."""
        info = self._infos.pop(worker_id, None)
        if info is None:
            return
        del self._reports[worker_id]
        self.events.append(WorkerEvent(now, "left", worker_id, info.role, reason, n_placed_again))
        self._departed[worker_id] = DepartedWorker(info, now, reason)
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)

    def on_report(self, worker_id: WorkerId, message: AnyMessage | None, now: float) -> None:
        """Record a worker's message."""
        if worker_id not in self._infos:
            return
        if isinstance(message, AnyWorkerLoad):
            self._reports[worker_id] = LastReport(now, message)
        else:
            before = self._reports.get(worker_id)
            self._reports[worker_id] = LastReport(now, None if before is None else before.load)

    def last_report(self, worker_id: WorkerId) -> LastReport | None:
        """Return the last report of a live worker; None of one that is not used."""
        return self._reports.get(worker_id)

    def departed(self, now: float) -> list[DepartedWorker]:
        """Return the workers that left lately and have not come back, the newest first."""
        departed = reversed(self._departed.values())
        return [worker for worker in departed if worker.at_s + DEPARTED_KEPT_S > now]
