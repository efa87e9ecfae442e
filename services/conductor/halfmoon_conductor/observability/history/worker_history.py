"""What each worker said last, and which ones left."""

from collections import OrderedDict
from typing import NamedTuple

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    DecodeLoad,
    KvstoreLoad,
    PrefillLoad,
    WorkerInfo,
)

#: Workers that left which are remembered at the most, and for how long.
MAX_DEPARTED = 64
DEPARTED_KEPT_S = 600.0

AnyWorkerLoad = PrefillLoad | DecodeLoad | KvstoreLoad


class LastReport(NamedTuple):
    """What came of one worker."""

    #: When anything came last, seconds.
    at_s: float
    load: AnyWorkerLoad | None


class DepartedWorker(NamedTuple):
    """A worker that was here, as it was then."""

    info: WorkerInfo
    at_s: float
    reason: str


class WorkerHistory:
    """Live workers' last words, and those of late who are gone."""

    def __init__(self) -> None:
        self._infos: dict[WorkerId, WorkerInfo] = {}
        #: Of those in `_infos` alone.
        self._heard: dict[WorkerId, LastReport] = {}
        #: The newest last; disjoint from `_infos`.
        self._gone: OrderedDict[WorkerId, DepartedWorker] = OrderedDict()

    def joined(self, info: WorkerInfo, now: float) -> None:
        """A worker is used from now on, or its record changed."""
        known = self._infos.get(info.worker_id)
        if known is not None and known.generation != info.generation:
            del self._heard[info.worker_id]
        self._infos[info.worker_id] = info
        self._gone.pop(info.worker_id, None)
        self.heard(info.worker_id, None, now)

    def left(self, worker_id: WorkerId, reason: str, now: float) -> None:
        """A worker is used no more."""
        info = self._infos.pop(worker_id, None)
        if info is None:
            return
        del self._heard[worker_id]
        self._gone[worker_id] = DepartedWorker(info, now, reason)
        if len(self._gone) > MAX_DEPARTED:
            self._gone.popitem(last=False)

    def heard(self, worker_id: WorkerId, message: AnyMessage | None, now: float) -> None:
        """A worker said something."""
        if worker_id not in self._infos:
            return
        if isinstance(message, AnyWorkerLoad):
            self._heard[worker_id] = LastReport(now, message)
        else:
            before = self._heard.get(worker_id)
            self._heard[worker_id] = LastReport(now, None if before is None else before.load)

    def last(self, worker_id: WorkerId) -> LastReport | None:
        """What came of a live worker; None of one that is not used."""
        return self._heard.get(worker_id)

    def gone(self, now: float) -> list[DepartedWorker]:
        """Workers that left of late and have not come back, the newest first."""
        return [gone for gone in reversed(self._gone.values()) if gone.at_s + DEPARTED_KEPT_S > now]
