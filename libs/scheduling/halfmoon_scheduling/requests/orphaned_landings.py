"""Track landings of requests that are over while a prefill may still write into them.

Decode frees such a landing when the prefill answers that it writes no more. When the prefill can't
be asked, the landing is *in doubt*: decode first keeps its pages aside for a while.
"""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import Cancel
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand


@dataclass(frozen=True, slots=True)
class OrphanedLanding:
    """A landing whose request is over for its client, with a prefill that may still write."""

    #: The worker that was told to stop and answers when it has.
    prefill: WorkerId
    #: All workers that write: `prefill`, and those that compute further stages with it.
    writers: tuple[WorkerId, ...]
    decode: WorkerId
    #: When prefill is taken to be unreachable, and the landing to be in doubt.
    deadline_s: float
    #: Whether a writer is lost: it can't be known to have stopped.
    in_doubt: bool = False


class OrphanedLandings:
    """Hold all orphaned landings, with their claims on decode workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._landings: dict[RequestId, OrphanedLanding] = {}
        #: How many there are at each decode worker with any.
        self._n_at: Counter[WorkerId] = Counter()

    def __len__(self) -> int:
        return len(self._landings)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._landings

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._landings)

    def get(self, request_id: RequestId) -> OrphanedLanding | None:
        """Return the orphaned landing of a request, if it has one."""
        return self._landings.get(request_id)

    @property
    def decodes(self) -> Set[WorkerId]:
        """Return the decode workers that have any: pages come free there."""
        return self._n_at.keys()

    def add(self, request_id: RequestId, landing: OrphanedLanding) -> None:
        """Keep the landing of a request that is over; its claim on decode stays."""
        self._landings[request_id] = landing
        self._n_at[landing.decode] += 1

    def free(self, request_id: RequestId, *, in_doubt: bool) -> list[AnyCommand]:
        """Have decode free a landing: prefill writes no more, or can't be asked."""
        landing = self._landings[request_id]
        self.forget(request_id)
        in_doubt = in_doubt or landing.in_doubt
        cancel = Cancel(request_id=request_id, landing_in_doubt=in_doubt)
        return send_if_live(self._cluster, landing.decode, cancel)

    def forget(self, request_id: RequestId) -> None:
        """Drop a landing that decode has freed by itself."""
        landing = self._landings.pop(request_id)
        self._n_at[landing.decode] -= 1
        if not self._n_at[landing.decode]:
            del self._n_at[landing.decode]
        self._cluster.decodes.release(landing.decode, request_id)

    def on_worker_lost(self, worker_id: WorkerId) -> list[AnyCommand]:
        """Drop the landings at a lost worker, and put those that it wrote into doubt."""
        commands: list[AnyCommand] = []
        for request_id, landing in list(self._landings.items()):
            if worker_id == landing.decode:
                self.forget(request_id)
            elif worker_id == landing.prefill:
                commands += self.free(request_id, in_doubt=True)
            elif worker_id in landing.writers:
                self._landings[request_id] = replace(landing, in_doubt=True)
        return commands

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Free the landings whose prefill has not answered in time."""
        commands: list[AnyCommand] = []
        for request_id, landing in list(self._landings.items()):
            if landing.deadline_s <= now:
                commands += self.free(request_id, in_doubt=True)
        return commands

    def held(self) -> dict[WorkerId, set[RequestId]]:
        """Return the claims at each decode worker, for audits: each prefill asked is live."""
        held: dict[WorkerId, set[RequestId]] = {}
        for request_id, landing in self._landings.items():
            assert landing.prefill in self._cluster
            held.setdefault(landing.decode, set()).add(request_id)
        assert {decode: len(each) for decode, each in held.items()} == self._n_at
        return held
