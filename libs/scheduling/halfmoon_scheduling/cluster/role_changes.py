"""Track the changes of role that workers were asked for, and the roles to which they are pinned.

A worker answers nothing to `ChangeRole`: its record says that it drains, then it leaves, and comes
back with a higher generation. A worker whose record stays as it is has refused, for example within
its cool-down. A pinned worker is then asked again, until it has the role; another one is not.
"""

from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.role_policy import OTHER_SIDE, Side

#: Seconds in which a worker that obeys begins to drain.
ANSWER_S = 10.0
#: Seconds in which a worker that has left comes back; it is then no longer expected.
RETURN_S = 600.0


@dataclass(slots=True)
class PendingChange:
    """A change of role that a worker was asked for and has not completed."""

    to: Side
    #: The start of the worker that was asked; a later one has completed the change, or lost it.
    generation: int
    #: When it was asked last.
    asked_s: float
    #: When it was in the cluster last.
    seen_s: float
    n_asked: int = 1


class RoleChanges:
    """Hold pins and pending changes; they outlive a worker's absence between two starts."""

    def __init__(self, cluster: Cluster) -> None:
        """Start without pins.

        Args:
            cluster: the live workers; read only.
        """
        self._cluster = cluster
        #: The role that an operator chose, by worker.
        self.pinned: dict[WorkerId, Side] = {}
        self._pending: dict[WorkerId, PendingChange] = {}

    def pending(self, worker_id: WorkerId) -> PendingChange | None:
        """Return the change that a worker was asked for; None: it has completed it, or has none."""
        change, info = self._pending.get(worker_id), self._cluster.get(worker_id)
        if change is not None and info is not None and info.generation != change.generation:
            return None
        return change

    def has_begun(self, worker_id: WorkerId) -> bool:
        """Return whether a worker has begun to change: it drains, or is away between two starts."""
        info = self._cluster.get(worker_id)
        return self.pending(worker_id) is not None and (info is None or info.draining)

    def staying(self, side: Side) -> list[WorkerInfo]:
        """Return the workers of a side that take new work and were not asked to leave it."""
        infos = self._cluster.accepting(side)
        return [info for info in infos if self.pending(info.worker_id) is None]

    def is_needed(self, info: WorkerInfo) -> bool:
        """Return whether no other worker of its role would be left; a server's pair is none."""
        assert info.role != "kvstore", "a kvstore belongs to no side"
        return not any(
            other.worker_id != info.worker_id and not other.server
            for other in self.staying(info.role)
        )

    def away(self) -> set[WorkerId]:
        """Return the workers that are pinned or changing, and not in the cluster."""
        known = {*self.pinned, *self._pending}
        return {worker_id for worker_id in known if worker_id not in self._cluster}

    def ask(self, worker_id: WorkerId, to: Side, now: float) -> None:
        """Note that a live worker is asked for a role, perhaps once more."""
        info = self._cluster.get(worker_id)
        assert info is not None, "the worker is not live"
        known = self.pending(worker_id)
        n_asked = 1 if known is None or known.to != to else known.n_asked + 1
        self._pending[worker_id] = PendingChange(to, info.generation, now, now, n_asked)

    def on_tick(self, now: float) -> list[tuple[WorkerId, Side]]:
        """Forget changes that are over, and return the pinned workers to ask, with their roles."""
        for worker_id, change in list(self._pending.items()):
            if self._is_over(worker_id, change, now):
                del self._pending[worker_id]
        return [
            (worker_id, side)
            for worker_id, side in self.pinned.items()
            if self._is_due(worker_id, side, now)
        ]

    def _is_over(self, worker_id: WorkerId, change: PendingChange, now: float) -> bool:
        """Return whether a change was completed, refused, or given up with its worker."""
        info = self._cluster.get(worker_id)
        if info is None:
            return now >= change.seen_s + RETURN_S
        change.seen_s = now
        if info.generation != change.generation:
            return True
        is_refused = not info.draining and now >= change.asked_s + ANSWER_S
        return is_refused and self.pinned.get(worker_id) != change.to

    def _is_due(self, worker_id: WorkerId, side: Side, now: float) -> bool:
        """Return whether a pinned worker is to be asked now for the role of its pin."""
        info = self._cluster.get(worker_id)
        if info is None or info.draining or info.role == side or side not in info.roles:
            return False
        change = self.pending(worker_id)
        if change is not None and now < change.asked_s + ANSWER_S:
            return False
        return not self.is_needed(info)

    def check(self) -> None:
        """Check that each pending change is of a side."""
        for change in self._pending.values():
            assert change.n_asked > 0 and change.seen_s >= change.asked_s
            assert change.to in OTHER_SIDE
