"""What the conductor measures of the cluster: workers, phases, bytes fetched."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric

from halfmoon_protocol.messages import PrefillDone
from halfmoon_runtime.gauges import Readings, expose
from halfmoon_scheduling.conductor import Conductor


class CoreMetrics:
    """Counters of what workers told, and gauges read from the core."""

    def __init__(self, core: Conductor, registry: CollectorRegistry) -> None:
        self._core = core
        self._fetched = Metric(
            "halfmoon_kv_fetched_bytes", "KV read from kvstores.", registry=registry
        )
        expose(self._read, registry=registry)

    def on_prefill_done(self, done: PrefillDone) -> None:
        """Take a finished prefill into account."""
        self._fetched.inc(done.fetched_bytes)

    def _read(self) -> Readings:
        roles = Tally(worker.role for worker in self._core.cluster.workers())
        return {
            "halfmoon_requests": ("Requests by phase.", dict(self._core.n_requests)),
            "halfmoon_workers": (
                "Live workers by role.",
                {role: roles[role] for role in ("prefill", "decode", "kvstore")},
            ),
        }
