"""Count what the connector does, for vLLM's metrics.

counts of both sides ──take──▶ stats of a step ──added up by vLLM──▶ Prometheus counters
"""

import threading
from collections import Counter

#: Prometheus counters without labels of their own, by the name of their count.
COUNTERS = {
    "blocks_looked_up": "Blocks of the pool that prompts were looked up for.",
    "blocks_found": "Blocks of prompts that a kvstore held, as far as was known.",
    "blocks_loaded": "Blocks read from kvstores into vLLM's cache.",
    "blocks_not_loaded": "Blocks found that did not come in time: vLLM computed them.",
    "blocks_corrupt": "Blocks whose bytes were not those that were stored: vLLM computed them.",
    "blocks_stored": "Blocks written to kvstores.",
    "bytes_loaded": "Bytes read from kvstores into vLLM's cache.",
    "bytes_stored": "Bytes written to kvstores.",
    "load_seconds": "Seconds of loads, added up over requests.",
    "store_seconds": "Seconds of stores, added up over groups of blocks.",
}
#: Counts by reason: prefix of the names of their counts.
BY_REASON = {
    "blocks_not_stored": "Blocks of prompts that were computed and not stored, by reason.",
    "requests_left_out": "Requests that are neither looked up nor stored, by reason.",
}
REASONS = {
    "blocks_not_stored": (
        "no_kvstore",
        "not_connected",
        "staging_full",
        "request_ended",
        "layers_differ",
        "kvstore",
        "not_reserved",
    ),
    "requests_left_out": ("lora", "multimodal", "not_tokens"),
}


class ConnectorCounts:
    """Counts of one side of the connector. All methods are safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: float = 1, reason: str = "") -> None:
        """Add to a count of `COUNTERS`, or with a reason to one of `BY_REASON`."""
        if n:
            with self._lock:
                self._counts[f"{name}.{reason}" if reason else name] += n  # type: ignore[assignment]

    def take(self) -> dict[str, float]:
        """Take all counts, which start again from 0."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)


def add_counts(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return the sums by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
