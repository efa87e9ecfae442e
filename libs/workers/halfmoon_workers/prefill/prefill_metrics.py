"""Count and time what a prefill worker does."""

from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.messages import PrefillDone, PrefillTimes
from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue

_STAGES = ("queue", "fetch", "compute", "transfer")


class PrefillCounts:
    """Counts and times since the start."""

    def __init__(self) -> None:
        self._ended = {"done": 0, "failed": 0, "stopped": 0}
        self._tokens = {"computed": 0, "cached": 0}
        self._landed = {"sent": 0, "held": 0}
        #: Prompts of a group whose layers of one stage were computed here.
        self.n_shares = 0
        self._stages = {stage: FastHistogram(time_buckets(0.0001, 100.0)) for stage in _STAGES}

    def done(self, done: PrefillDone, n_tokens: int) -> None:
        """Count a prefilled prompt of so many tokens."""
        self.ended("done")
        self._tokens["cached"] += done.n_cached
        self._tokens["computed"] += n_tokens - done.n_cached
        times = done.times
        assert isinstance(times, PrefillTimes), "this worker says where its time went"
        self._stages["queue"].observe(times.queue_s)
        self._stages["fetch"].observe(times.fetch_s)
        self._stages["compute"].observe(times.compute_s)
        self._stages["transfer"].observe(times.transfer_s)

    def landed(self, n_sent_bytes: int, n_held_bytes: int) -> None:
        """Count the KV of a prompt, or of a share of one, that is in its landing."""
        self._landed["sent"] += n_sent_bytes
        self._landed["held"] += n_held_bytes

    def ended(self, how: str) -> None:
        """Count the end of a request: done, failed or stopped."""
        self._ended[how] += 1

    def metrics(self) -> MetricSnapshot:
        """Return what the metrics show."""
        return {
            "halfmoon_prefill_requests_ended_total": (
                "Prefills that ended: done, failed, or stopped by the conductor.",
                by_label("result", self._ended),
            ),
            "halfmoon_prefill_tokens_total": (
                "Tokens of prompts that were prefilled, by where their KV is from.",
                by_label("source", self._tokens),
            ),
            "halfmoon_prefill_landing_bytes_total": (
                "KV of prompts that ended well, by whether it was sent to the decode worker or"
                " was held there already, in pages of earlier requests.",
                by_label("source", self._landed),
            ),
            "halfmoon_prefill_shares_total": (
                "Prompts of a group of which this worker computed one stage's layers.",
                self.n_shares,
            ),
            "halfmoon_prefill_stage_seconds": (
                "What requests waited for at this worker; a request's stages add up to its time"
                " here.",
                by_label("stage", self._stages),
            ),
        }


def queue_metrics(n_requests: int, queue: PrefillQueue) -> MetricSnapshot:
    """Return the metrics of the prompts that are here."""
    return {
        "halfmoon_prefill_requests": ("Requests here.", n_requests),
        "halfmoon_prefill_queued_tokens": ("Tokens still to compute.", queue.queued_tokens),
    }


def page_metrics(pages: PageAllocator) -> MetricSnapshot:
    """Return the metrics of a pool of pages."""
    used = pages.n_pages - pages.n_free
    return {
        "halfmoon_pages": (
            "Pages of this worker's pool by state.",
            by_label("state", {"free": pages.n_free, "used": used}),
        )
    }


def replica_metrics(replicas: ReplicaSelector) -> MetricSnapshot:
    """Return the metrics of reads from kvstores."""
    return {
        "halfmoon_prefill_kvstores_paused": (
            "KvstoreClients that failed of late and are not asked for now.",
            replicas.n_left_out,
        ),
        "halfmoon_prefill_cached_reads_total": (
            "Cached prefixes read from the first replica that was asked, from another one"
            " after it failed, and from none: computed instead.",
            by_label("replica", replicas.reads),
        ),
        "halfmoon_prefill_cached_blocks_total": (
            "Blocks of cached prefixes that were read, by the tier of the kvstore that had them"
            " when they were asked for.",
            by_label("tier", replicas.blocks),
        ),
    }
