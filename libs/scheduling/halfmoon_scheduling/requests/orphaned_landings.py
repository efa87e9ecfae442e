"""Requests that are over while a prefill may still write into their landing.

Decode frees such a landing when the prefill says that it writes no more, or, when it can't be
asked, keeps the pages aside for a while first: that is what "in doubt" stands for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import Cancel
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.commands import AnyCommand, Send


@dataclass(frozen=True, slots=True)
class OrphanedLanding:
    """A request that is over for its client, with prefill not yet known to have stopped."""

    #: Who was told to stop and will say so.
    prefill: WorkerId
    #: It and those that compute further stages with it: all who write.
    writers: tuple[WorkerId, ...]
    decode: WorkerId
    #: Past it, prefill is taken to be unreachable and the landing to be in doubt.
    deadline_s: float
    #: Whether a writer is lost: it can't be known to have stopped.
    in_doubt: bool = False


class OrphanedLandings:
    """All of them, with their claims on decode workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stopping: dict[RequestId, OrphanedLanding] = {}

    def __len__(self) -> int:
        return len(self._stopping)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._stopping

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._stopping)

    def get(self, request_id: RequestId) -> OrphanedLanding | None:
        """A request that is over, while its prefill may still write."""
        return self._stopping.get(request_id)

    def add(self, request_id: RequestId, stopping: OrphanedLanding) -> None:
        """Its prefill was told to stop; its claim on decode stays."""
        self._stopping[request_id] = stopping

    def free(self, request_id: RequestId, *, in_doubt: bool) -> list[AnyCommand]:
        """Prefill writes no more, or can't be asked: decode may let go."""
        stopping = self._stopping[request_id]
        self.forget(request_id)
        if stopping.decode not in self._cluster:
            return []
        in_doubt = in_doubt or stopping.in_doubt
        cancel = Cancel(request_id=request_id, landing_in_doubt=in_doubt)
        return [Send(stopping.decode, cancel)]

    def forget(self, request_id: RequestId) -> None:
        """Decode has let go by itself."""
        stopping = self._stopping.pop(request_id)
        self._cluster.decodes.release(stopping.decode, request_id)

    def on_worker_lost(self, worker_id: WorkerId) -> list[AnyCommand]:
        """A worker has left the cluster: its landings are gone, what it wrote is in doubt."""
        commands: list[AnyCommand] = []
        for request_id, stopping in list(self._stopping.items()):
            if worker_id == stopping.decode:
                self.forget(request_id)
            elif worker_id == stopping.prefill:
                commands += self.free(request_id, in_doubt=True)
            elif worker_id in stopping.writers:
                self._stopping[request_id] = replace(stopping, in_doubt=True)
        return commands

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Free the landings of those whose prefill has not answered in time."""
        commands: list[AnyCommand] = []
        for request_id, stopping in list(self._stopping.items()):
            if stopping.deadline_s <= now:
                commands += self.free(request_id, in_doubt=True)
        return commands

    def held(self) -> dict[WorkerId, set[RequestId]]:
        """For audits: claims by decode worker. The prefill that was told is here."""
        held: dict[WorkerId, set[RequestId]] = {}
        for request_id, stopping in self._stopping.items():
            assert stopping.prefill in self._cluster
            held.setdefault(stopping.decode, set()).add(request_id)
        return held
