"""What the conductor measures of the cluster: stages of requests, workers, phases.

The stages split a request's time to first token, so that "why was it slow?" has an answer:
queued at prefill, computing there (waits for cached blocks included), draining (the last
bytes on their way to decode).
"""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Metric

from halfmoon_protocol.messages import PrefillDone
from halfmoon_runtime.gauges import Readings, expose
from halfmoon_scheduling.conductor import Conductor

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class CoreMetrics:
    """Histograms of stages, and gauges read from the core."""

    def __init__(self, core: Conductor, registry: CollectorRegistry) -> None:
        self._core = core
        self._stages = Histogram(
            "halfmoon_prefill_stage_seconds",
            "Stages of a prefill: queue, compute, drain; fetch runs beside the first two.",
            ("stage",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._fetched = Metric(
            "halfmoon_kv_fetched_bytes", "KV read from kvstores.", registry=registry
        )
        expose(self._read, registry=registry)

    def on_prefill_done(self, done: PrefillDone) -> None:
        """Take a finished prefill into account."""
        self._stages.labels("queue").observe(done.queue_s)
        self._stages.labels("compute").observe(done.compute_s)
        self._stages.labels("drain").observe(done.drain_s)
        if done.fetched_bytes:
            self._stages.labels("fetch").observe(done.fetch_s)
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
