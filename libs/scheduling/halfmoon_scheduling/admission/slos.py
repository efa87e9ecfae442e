"""Compute the limits of a request: its own, or the conductor's in seconds or multiples."""

from halfmoon_protocol.bounds import MAX_SECONDS
from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Request


class Slos:
    """Compute the limits of requests in seconds; a multiple is one of a worker's unloaded time."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster

    def ttft_s(self, request: Request, prefill: WorkerId | None = None) -> float | None:
        """Return the limit of the time to first token.

        None: there is no limit, or it is a multiple and no live prefill worker is given.
        """
        config = self._config
        limit_s = config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
        if limit_s is not None or config.ttft_slo_multiple is None:
            return limit_s
        # A worker that would have prefilled instead of a decode worker may be gone by now.
        if prefill is None or prefill not in self._cluster.prefills:
            return None
        alone_s = self._cluster.prefills.unloaded_s(prefill, len(request.token_ids))
        return config.ttft_slo_multiple * alone_s

    def first_token_left_s(
        self, request: Request, prefill: WorkerId | None, waited_s: float
    ) -> float | None:
        """Return the seconds until the next token is due of a request that has waited so long.

        None: there is no limit. A request whose answer has begun is due at once: a client waits
        in the middle of it.
        """
        if len(request.token_ids) > request.n_prompt:
            return 0.0
        limit_s = self.ttft_s(request, prefill)
        return None if limit_s is None else min(MAX_SECONDS, max(0.0, limit_s - waited_s))

    def tbt_s(self, request: Request, decode: WorkerId | None) -> float | None:
        """Return the limit of the time between tokens.

        None: there is no limit, or it is a multiple and no decode worker is given.
        """
        config = self._config
        limit_s = config.tbt_slo_s if request.tbt_slo_s is None else request.tbt_slo_s
        if limit_s is not None or config.tbt_slo_multiple is None or decode is None:
            return limit_s
        alone_s = self._cluster.decodes.unloaded_tbt_s(decode, len(request.token_ids))
        return config.tbt_slo_multiple * alone_s
