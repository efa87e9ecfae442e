"""Choose the live worker that changes between prefill and decode, by the cluster's loads.

A prefill worker has two loads, of which the larger counts. One is the predicted time until a new
request would start, over the TTFT limit. The other is the share of time with work lately: a queue
alone is short until there is too much work, so it can't tell that a worker can be spared.

A decode worker has two as well: the time of a step over the TBT limit, and the share of its pages
that are reserved. Without a limit seconds count. Only workers whose records allow it are changed,
and draining workers belong to no side.
"""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.role_policy import RoleChange, RoleLimits, RolePolicy
from halfmoon_scheduling.config import SchedulingConfig

#: Seconds between two observations of the loads.
ROLE_PERIOD_S = 1.0
#: Weight of the newest observation in the share of those that found work at a prefill worker.
_OBSERVATION_WEIGHT = 1 / 30


class RoleBalancer:
    """Observe both sides periodically, and propose changes."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster) -> None:
        self._ttft_s = config.ttft_slo_s or 1.0
        self._tbt_s = config.tbt_slo_s or 1.0
        self._cluster = cluster
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

    def propose(self, now: float) -> RoleChange | None:
        """Return the change to make now, if any."""
        if now < self._observed_s + ROLE_PERIOD_S:
            return None
        self._observed_s = now
        prefills, decodes = self._cluster.accepting("prefill"), self._cluster.accepting("decode")
        queues_s = self._cluster.prefills.queues_s(now)
        self._busy = {
            worker: before + ((queue_s > 0) - before) * _OBSERVATION_WEIGHT
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
    """Return the workers that can change between both roles."""
    return {info.worker_id for info in workers if {"prefill", "decode"} <= set(info.roles)}
