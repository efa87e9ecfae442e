"""Choose the live worker that changes between prefill and decode: by load, or by an operator.

A prefill worker has two loads, of which the larger counts. One is the predicted time until a new
request would start, over the TTFT limit. The other is the share of time with work lately: a queue
alone is short until there is too much work, so it can't tell that a worker can be spared.

A decode worker has two as well: the time of a step over the TBT limit, and the share of its pages
that are reserved. Without a limit seconds count. Only workers whose records allow it are changed,
and draining workers belong to no side.

Where all decode workers prefill prompts of any length, they take what prefill workers have no time
for. So a prefill worker with work is no sign that prefill is short, or that it can't be spared: its
queue alone counts.

An operator's request pins a worker to a role. The policy leaves a pinned worker alone, and the
worker is asked again until it has the role.
"""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.role_changes import RoleChanges
from halfmoon_scheduling.cluster.role_outlook import (
    NextChange,
    RoleOutlook,
    SideOutlook,
    WorkerRole,
)
from halfmoon_scheduling.cluster.role_policy import (
    RoleChange,
    RoleForecast,
    RoleLimits,
    RolePolicy,
    Side,
)
from halfmoon_scheduling.cluster.role_refusals import RoleRefusal, can_change, find_refusal
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import RequestedRole

#: Seconds between two observations of the loads.
ROLE_PERIOD_S = 1.0
#: Weight of the newest observation in the share of those that found work at a prefill worker.
_OBSERVATION_WEIGHT = 1 / 30
_SIDES: tuple[Side, ...] = ("prefill", "decode")
_BY_OPERATOR = "an operator has pinned the worker to this role"


class RoleBalancer:
    """Observe both sides periodically, propose changes, and hold operators' pins."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster) -> None:
        self._automatic = config.role_changes
        self._ttft_s = config.ttft_slo_s or 1.0
        self._tbt_s = config.tbt_slo_s or 1.0
        self._cluster = cluster
        self._changes = RoleChanges(cluster)
        self._observed_s = float("-inf")
        #: Share of recent observations that found work, at each live prefill worker.
        self._busy: dict[WorkerId, float] = {}
        self._policy = RolePolicy(
            RoleLimits(
                busy_load=config.role_busy_load,
                ratio=config.role_ratio,
                lasting_s=config.role_lasting_s,
                rest_s=config.role_rest_s,
            )
        )

    # -- by an operator ----------------------------------------------------------------------

    def find_refusal(self, worker_id: WorkerId, role: RequestedRole) -> RoleRefusal | None:
        """Return why an operator's request is refused; None: it is not."""
        return find_refusal(self._cluster, self._changes, worker_id, role)

    def on_requested(
        self, worker_id: WorkerId, role: RequestedRole, now: float
    ) -> list[RoleChange]:
        """Pin a worker, or release it, as an operator requests; return the change to make, if any.

        A request that is refused changes nothing.
        """
        if self.find_refusal(worker_id, role) is not None:
            return []
        if role == "auto":
            del self._changes.pinned[worker_id]
            return []
        self._changes.pinned[worker_id] = role
        info = self._cluster.get(worker_id)
        if info is None or info.role == role:
            return []
        self._policy.rest(now)
        return [self._ask(RoleChange(worker_id, role, _BY_OPERATOR), now)]

    # -- by time and load --------------------------------------------------------------------

    def on_tick(self, now: float) -> list[RoleChange]:
        """Return the changes to make now: those of pinned workers, then the policy's."""
        pinned = [
            self._ask(RoleChange(worker_id, side, _BY_OPERATOR), now)
            for worker_id, side in self._changes.on_tick(now)
        ]
        proposed = self._propose(now) if self._automatic else None
        return pinned if proposed is None else [*pinned, self._ask(proposed, now)]

    def _ask(self, change: RoleChange, now: float) -> RoleChange:
        self._changes.ask(change.worker_id, change.to, now)
        return change

    def _propose(self, now: float) -> RoleChange | None:
        """Return the change that the loads call for, if any."""
        if now < self._observed_s + ROLE_PERIOD_S:
            return None
        self._observed_s = now
        self._busy = {
            worker: before + ((queue_s > 0) - before) * _OBSERVATION_WEIGHT
            for worker, queue_s in self._cluster.prefills.queues_s(now).items()
            for before in (self._busy.get(worker, 0.0),)
        }
        loads = self._loads(now)
        return self._policy.observe(loads["prefill"], loads["decode"], now, movable=self._movable())

    def _loads(self, now: float) -> dict[Side, dict[WorkerId, float]]:
        """Return the loads of the workers of each side that stay there."""
        queues_s = self._cluster.prefills.queues_s(now)
        busy = {} if self._cluster.decodes_take_prompts else self._busy
        steps_s = self._cluster.decodes.loads_s()
        used = self._cluster.decodes.used_shares()
        return {
            "prefill": {
                i.worker_id: max(queues_s[i.worker_id] / self._ttft_s, busy.get(i.worker_id, 0.0))
                for i in self._changes.staying("prefill")
            },
            "decode": {
                i.worker_id: max(steps_s[i.worker_id] / self._tbt_s, used[i.worker_id])
                for i in self._changes.staying("decode")
            },
        }

    def _movable(self) -> set[WorkerId]:
        """Return the workers that the policy may change."""
        return {
            info.worker_id
            for side in _SIDES
            for info in self._changes.staying(side)
            if can_change(info) and info.worker_id not in self._changes.pinned
        }

    # -- for operators -----------------------------------------------------------------------

    def outlook(self, now: float) -> RoleOutlook:
        """Return all roles, and what the policy does next; nothing changes."""
        loads = self._loads(now)
        forecast = self._policy.forecast(
            loads["prefill"], loads["decode"], now, movable=self._movable()
        )
        reason = forecast.reason
        if not self._automatic:
            reason = "role_changes is off: only operators change roles"
        by_worker = {**loads["prefill"], **loads["decode"]}
        infos = {info.worker_id: info for info in self._cluster.workers() if info.role != "kvstore"}
        return RoleOutlook(
            automatic=self._automatic,
            pools={side: SideOutlook(forecast.loads[side], len(loads[side])) for side in _SIDES},
            next=self._next(forecast),
            rest_s=forecast.rest_s if self._automatic else 0.0,
            reason=reason,
            workers=tuple(
                self._worker_role(worker_id, infos.get(worker_id), by_worker.get(worker_id))
                for worker_id in sorted({*infos, *self._changes.away()})
            ),
        )

    def _next(self, forecast: RoleForecast) -> NextChange | None:
        if forecast.change is None or not self._automatic:
            return None
        return NextChange(forecast.change.worker_id, forecast.change.to, forecast.due_s)

    def _worker_role(
        self, worker_id: WorkerId, info: WorkerInfo | None, load: float | None
    ) -> WorkerRole:
        change = self._changes.pending(worker_id)
        return WorkerRole(
            worker_id=worker_id,
            role=None if info is None else info.role,
            roles=() if info is None else info.roles or (info.role,),
            draining=info is not None and info.draining,
            pinned=self._changes.pinned.get(worker_id),
            load=load,
            changing_to=None if change is None else change.to,
            has_begun=self._changes.has_begun(worker_id),
            n_asked=0 if change is None else change.n_asked,
        )

    def check(self) -> None:
        """Audit pins and pending changes."""
        self._changes.check()
