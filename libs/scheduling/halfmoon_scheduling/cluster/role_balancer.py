"""Which live worker is told to change sides: the roles' policy over the cluster's books.

What a side's load is: at a prefill worker the predicted time until a new request would begin,
over the limit for the time to first token, or the share of time that it has lately had work,
whichever is more (a queue alone is short until there is too much work, and so does not say that a
worker can be spared); at a decode worker the time of a step over the limit
for the time between tokens, or the share of its pages that are promised, whichever is more.
Without a limit seconds count. Only workers that say so in their record are asked, and those
that are on their way out belong to no side.
"""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.role_policy import RoleChange, RoleLimits, RolePolicy
from halfmoon_scheduling.config import SchedulingConfig

#: Seconds between two looks at the loads.
ROLE_PERIOD_S = 1.0
#: Weight of the newest look in the share of looks that found work at a prefill worker.
_LOOK_WEIGHT = 1 / 30


class RoleBalancer:
    """Looks at both sides now and then."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster) -> None:
        self._ttft_s = config.ttft_slo_s or 1.0
        self._tbt_s = config.tbt_slo_s or 1.0
        self._cluster = cluster
        self._looked_s = float("-inf")
        #: Share of recent looks that found work, at prefill workers that are live.
        self._busy: dict[WorkerId, float] = {}
        self._policy = RolePolicy(
            RoleLimits(
                busy_load=config.role_busy_load,
                ratio=config.role_ratio,
                lasting_s=config.role_lasting_s,
                rest_s=config.role_rest_s,
            )
        )

    def propose(self, now: float) -> RoleChange | None:
        """Who is to change now, if anybody."""
        if now < self._looked_s + ROLE_PERIOD_S:
            return None
        self._looked_s = now
        prefills, decodes = self._cluster.accepting("prefill"), self._cluster.accepting("decode")
        queues_s = self._cluster.prefills.queues_s(now)
        self._busy = {
            worker: before + ((queue_s > 0) - before) * _LOOK_WEIGHT
            for worker, queue_s in queues_s.items()
            for before in (self._busy.get(worker, 0.0),)
        }
        steps_s = self._cluster.decodes.loads_s()
        used = self._cluster.decodes.used_shares()
        return self._policy.observe(
            {
                i.worker_id: max(queues_s[i.worker_id] / self._ttft_s, self._busy[i.worker_id])
                for i in prefills
            },
            {
                i.worker_id: max(steps_s[i.worker_id] / self._tbt_s, used[i.worker_id])
                for i in decodes
            },
            now,
            movable=_movable((*prefills, *decodes)),
        )


def _movable(workers: tuple[WorkerInfo, ...]) -> set[WorkerId]:
    """Those that can be told to change."""
    return {info.worker_id for info in workers if {"prefill", "decode"} <= set(info.roles)}
