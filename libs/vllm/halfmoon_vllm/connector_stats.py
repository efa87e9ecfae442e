"""Hand the connector's counts to vLLM's metrics; imports vLLM."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from halfmoon_vllm.connector_counts import BY_REASON, COUNTERS, REASONS, add_counts


@dataclass
class HalfmoonStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def aggregate(self, other: Any) -> "HalfmoonStats":
        """Add the counts of another step or worker."""
        self.data = add_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, float]:
        """Return the counts, for vLLM's log."""
        return {name: round(n, 3) for name, n in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class HalfmoonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters `vllm:halfmoon_…_total` of each engine of a server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:halfmoon_{name}", documentation=text, labelnames=labelnames
            )
            self._add(name, counter, ())
        for name, text in BY_REASON.items():
            counter = self._counter_cls(
                name=f"vllm:halfmoon_{name}",
                documentation=text,
                labelnames=[*labelnames, "reason"],
            )
            for reason in REASONS[name]:
                self._add(f"{name}.{reason}", counter, (reason,))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of a step."""
        for name, n in transfer_stats_data.items():
            if (of_engines := self._counters.get(name)) is not None:
                of_engines[engine_idx].inc(n)

    def _add(self, name: str, counter: Any, more: tuple[str, ...]) -> None:
        self._counters[name] = {
            engine: counter.labels(*values, *more)
            for engine, values in self.per_engine_labelvalues.items()
        }
