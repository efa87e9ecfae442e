"""Measure the cluster: requests by phase, decisions, workers, KV events.

The core keeps plain numbers, since it knows no metrics library; they are read when metrics are
scraped. What the core does not count is counted here, as a recorder of the shell.
"""

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeLoad, PrefillDone, PrefillLoad
from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets
from halfmoon_runtime.observability.metrics import (
    LabelledValues,
    MetricSnapshot,
    by_label,
    expose_metrics,
)
from halfmoon_scheduling.commands import AnyCommand, Fail, Resubmit
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.prediction_error import BUCKET_BOUNDS, ErrorHistogram
from halfmoon_scheduling.events import AnyEvent, KvChanged, MessageReceived

#: Origins of the KV of prompt tokens; "elsewhere": from an unknown kvstore.
_SOURCES = ("computed", "kvstore_same_host", "kvstore_other_host", "kvstore_elsewhere")
#: Reasons of rejections; see `Conductor.refusals`.
_REJECTION_REASONS = (
    "ttft",
    "tbt",
    "tbt_late",
    "pages",
    "queue_full",
    "queue_time",
    "too_long",
    "unsupported",
    "unavailable",
)


class ClusterMetrics:
    """Export what the core knows and what passed through the shell, in one registry."""

    def __init__(
        self,
        core: Conductor,
        registry: CollectorRegistry,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Register the metrics.

        Args:
            core: the core to observe.
            registry: receives the metrics.
            wall_clock: seconds since 1970, as kvstores write them into their events.
        """
        self._core = core
        self._wall_clock = wall_clock
        self._tokens: Counter[str] = Counter(dict.fromkeys(_SOURCES, 0))
        self._fetched_bytes = 0
        self._n_resubmitted = 0
        self._n_failed = 0
        self._event_lag_s = FastHistogram(time_buckets(0.0005, 60.0))
        #: Free pages and all pages as workers last reported them; may include departed workers.
        self._pages: dict[WorkerId, tuple[int, int]] = {}
        expose_metrics(self.metrics, registry=registry)

    def on_prefill_done(self, worker_id: WorkerId, done: PrefillDone) -> None:
        """Count a finished prefill, before the core handles it."""
        self._fetched_bytes += done.fetched_bytes
        n_tokens = self._core.n_tokens_of(done.request_id)
        self._tokens["computed"] += max(0, n_tokens - done.n_cached)
        if not done.n_cached:
            return
        reader = self._core.cluster.get(worker_id)
        source = self._core.cluster.get(done.fetched_from) if done.fetched_from else None
        if reader is None or source is None:
            self._tokens["kvstore_elsewhere"] += done.n_cached
        else:
            place = "same" if reader.host == source.host else "other"
            self._tokens[f"kvstore_{place}_host"] += done.n_cached

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Count one call of the core; see `shell.Recorder`."""
        match event:
            case KvChanged(batch=batch):
                self._event_lag_s.observe(max(0.0, self._wall_clock() - batch.timestamp))
            case MessageReceived(worker_id=worker_id, message=DecodeLoad() | PrefillLoad() as load):
                self._pages[worker_id] = (load.free_pages, load.n_pages)
            case _:
                pass
        for command in commands:
            if isinstance(command, Resubmit):
                self._n_resubmitted += 1
            elif isinstance(command, Fail):
                self._n_failed += 1

    def metrics(self) -> MetricSnapshot:
        """Return the current values of all metrics."""
        return {**self._requests(), **self._workers(), **self._events()}

    def _requests(self) -> MetricSnapshot:
        core = self._core
        return {
            "halfmoon_requests": (
                "Requests by phase; stopping: given up while their prefill may still write.",
                by_label("phase", dict(core.n_requests)),
            ),
            "halfmoon_rejections_total": (
                "Requests refused by admission or placement, by what was lacking.",
                by_label("reason", dict.fromkeys(_REJECTION_REASONS, 0) | core.refusals),
            ),
            "halfmoon_request_retries_total": (
                "Tries that ended early, mostly through a worker's fault or end, and were followed"
                " by another.",
                self._n_resubmitted,
            ),
            "halfmoon_requests_stopped_total": (
                "Requests that made room for a tenant with fewer requests at decode, and go on"
                " later.",
                core.n_stopped_requests,
            ),
            "halfmoon_requests_failed_total": (
                "Requests that ended in an error, since another try was of no use.",
                self._n_failed,
            ),
            "halfmoon_prediction_error_ratio": (
                "Observed over predicted seconds: 1 is right, 2 took twice as long.",
                by_label(
                    "quantity",
                    {
                        quantity: _distribution(errors)
                        for quantity, errors in core.prediction_errors.histograms.items()
                    },
                ),
            ),
            "halfmoon_prefilled_tokens_total": (
                "Tokens of prompts that were prefilled, those of further tries included, by where"
                " their KV is from.",
                by_label("source", dict(self._tokens)),
            ),
            "halfmoon_kv_fetched_bytes_total": ("KV read from kvstores.", self._fetched_bytes),
        }

    def _workers(self) -> MetricSnapshot:
        workers = self._core.cluster.workers()
        roles = Counter(info.role for info in workers)
        pages = {
            role: [self._pages.get(info.worker_id, (0, 0)) for info in workers if info.role == role]
            for role in ("prefill", "decode")
        }
        free = {
            role: sum(free for free, _ in pages_of_role) for role, pages_of_role in pages.items()
        }
        n_pages = {role: sum(n for _, n in pages_of_role) for role, pages_of_role in pages.items()}
        self._pages = {
            worker_id: pages_of_worker
            for worker_id, pages_of_worker in self._pages.items()
            if worker_id in self._core.cluster
        }
        return {
            "halfmoon_workers": (
                "Live workers by role.",
                by_label("role", {role: roles[role] for role in ("prefill", "decode", "kvstore")}),
            ),
            "halfmoon_cluster_pages": (
                "Pages of all live workers, by their last reports.",
                LabelledValues(
                    ("role", "state"),
                    {(role, "free"): free[role] for role in pages}
                    | {(role, "used"): n_pages[role] - free[role] for role in pages},
                ),
            ),
            "halfmoon_kv_cache_usage_ratio": (
                "Share of those pages that are used.",
                by_label(
                    "role",
                    {role: 1 - free[role] / n_pages[role] for role in pages if n_pages[role]},
                ),
            ),
        }

    def _events(self) -> MetricSnapshot:
        following, index = self._core.following, self._core.index
        return {
            "halfmoon_kv_event_lag_seconds": (
                "From the publication of KV events, by the kvstore's clock, until they were"
                " taken in here.",
                self._event_lag_s,
            ),
            "halfmoon_kv_events_behind": (
                "Messages of KV events that a kvstore published and that are not in the index.",
                by_label("kvstore", {str(worker): n for worker, n in following.behind.items()}),
            ),
            "halfmoon_kv_snapshots_total": (
                "Snapshots asked for: of a kvstore that joined, or whose events were lost.",
                following.n_snapshots,
            ),
            "halfmoon_index_blocks": ("Blocks that some kvstore holds.", len(index)),
        }


def _distribution(errors: ErrorHistogram) -> FastHistogram:
    shown = FastHistogram(BUCKET_BOUNDS)
    shown.counts, shown.sum = errors.counts, errors.ratio_sum
    return shown
