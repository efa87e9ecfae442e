"""Define the view of roles for operators: each worker's role, and the next change with its reason.

It is made by `role_balancer` without changing anything.
"""

from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Role
from halfmoon_scheduling.cluster.role_policy import Side


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """The role of one prefill or decode worker."""

    #: Its name.
    worker_id: WorkerId
    #: Its present role; None: it is pinned or changing, and away.
    role: Role | None
    #: Roles that it can have.
    roles: tuple[Role, ...]
    #: True when it takes no new requests.
    draining: bool
    #: The role that an operator chose; None: the policy may change it.
    pinned: Side | None
    #: Its load as the policy counts it; None: it takes no new requests.
    load: float | None
    #: The role that it was asked for and does not have yet.
    changing_to: Side | None
    #: Whether it has begun to change: it drains, or is away.
    has_begun: bool
    #: How often it was asked; more than once: it refused before.
    n_asked: int


@dataclass(frozen=True, slots=True)
class SideOutlook:
    """The load of one side."""

    #: Mean load of its workers; 0 without any.
    load: float
    #: Workers that take new requests and stay.
    n_workers: int


@dataclass(frozen=True, slots=True)
class NextChange:
    """The change that the policy makes if the loads stay as they are."""

    #: The worker that changes.
    worker_id: WorkerId
    #: The role that it is asked to take on.
    to: Side
    #: Seconds until then.
    due_s: float


@dataclass(frozen=True, slots=True)
class RoleOutlook:
    """All roles, and what the policy does next."""

    #: Whether the policy may change roles: the setting `role_changes`.
    automatic: bool
    #: By side.
    pools: dict[Side, SideOutlook]
    #: None: no change follows from these loads.
    next: NextChange | None
    #: Seconds in which the policy makes no change, because one was made.
    rest_s: float
    #: Why there is a next change, or none.
    reason: str
    #: By their ids.
    workers: tuple[WorkerRole, ...]
