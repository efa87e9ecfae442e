"""Check an operator's request for a role against the cluster, before anything changes."""

from dataclasses import dataclass
from typing import Literal

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.role_changes import RoleChanges
from halfmoon_scheduling.events import RequestedRole

#: Characters of an unknown worker's name that are repeated.
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RoleRefusal:
    """Hold the reason for which an operator's request for a role is refused."""

    #: unknown: no such worker; invalid: it can never be; conflict: it can't be at present.
    kind: Literal["unknown", "invalid", "conflict"]
    #: The field at fault.
    field: Literal["worker_id", "role"]
    #: Names the value and the way out.
    reason: str


def can_change(info: WorkerInfo) -> bool:
    """Return whether a worker's record lists both roles."""
    return {"prefill", "decode"} <= set(info.roles)


def find_refusal(
    cluster: Cluster, changes: RoleChanges, worker_id: WorkerId, role: RequestedRole
) -> RoleRefusal | None:
    """Return why a worker can't be pinned to a role, or released with "auto"; None: it can."""
    info, change = cluster.get(worker_id), changes.pending(worker_id)
    pinned = changes.pinned.get(worker_id)
    if info is None and change is None and pinned is None:
        name = repr(str(worker_id)[:_SHOWN])
        return RoleRefusal(
            "unknown", "worker_id", f"There is no worker {name}: `halfmoon roles` lists all."
        )
    if info is not None and not can_change(info):
        return RoleRefusal(
            "invalid",
            "worker_id",
            f"{worker_id} is a {info.role} worker alone, by its record: one that is started with"
            " --roles prefill,decode can change.",
        )
    if role == "auto":
        if pinned is not None:
            return None
        reason = f"role is 'auto', but {worker_id} is pinned to no role: name one to pin it."
        return RoleRefusal("conflict", "role", reason)
    if pinned == role:
        reason = f"role is {role!r}, to which {worker_id} is pinned already: 'auto' releases it."
        return RoleRefusal("conflict", "role", reason)
    # A worker that was asked more than once has refused before, so it is not changing.
    if change is not None and (changes.has_begun(worker_id) or change.n_asked == 1):
        reason = f"{worker_id} is changing to {change.to}: ask again when it is back."
        return RoleRefusal("conflict", "worker_id", reason)
    if info is None or info.draining:
        reason = f"{worker_id} is draining or away: ask again when it takes requests."
        return RoleRefusal("conflict", "worker_id", reason)
    if info.role != role and changes.is_needed(info):
        reason = (
            f"role is {role!r}, but {worker_id} is the last {info.role} worker that takes"
            f" requests: start another one, or change one to {info.role}, first."
        )
        return RoleRefusal("conflict", "role", reason)
    return None
