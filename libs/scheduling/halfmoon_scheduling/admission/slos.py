"""The limits that a request is held to: its own, or the conductor's in seconds or multiples."""

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Request


class Slos:
    """Limits of requests in seconds; multiples need a worker to be multiples of."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster

    def ttft_s(self, request: Request, prefill: WorkerId | None = None) -> float | None:
        """Time to first token; None: no limit, or a multiple and no prefill worker."""
        config = self._config
        limit_s = config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        if limit_s is not None or config.ttft_slo_multiple is None or prefill is None:
            return limit_s
        alone_s = self._cluster.prefills.unloaded_s(prefill, len(request.token_ids))
        return config.ttft_slo_multiple * alone_s

    def tbt_s(self, request: Request, decode: WorkerId | None) -> float | None:
        """Time between tokens; None: no limit, or a multiple and no decode worker."""
        config = self._config
        limit_s = config.tbt_slo_s if request.tbt_slo_s is None else request.tbt_slo_s
        if limit_s is not None or config.tbt_slo_multiple is None or decode is None:
            return limit_s
        alone_s = self._cluster.decodes.unloaded_tbt_s(decode, len(request.token_ids))
        return config.tbt_slo_multiple * alone_s
