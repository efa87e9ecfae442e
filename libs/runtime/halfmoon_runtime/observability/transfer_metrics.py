"""Report a transfer engine's counters as metrics, the same for every service."""

from collections.abc import Callable, Mapping
from typing import Protocol

from halfmoon_runtime.observability.metrics import LabelledValues, MetricSnapshot, by_label


class TransferCounts(Protocol):
    """Counters of `halfmoon_transfer.TransferStats`, which this library does not import."""

    @property
    def n_transfers(self) -> int:
        """See there."""
        ...

    @property
    def n_failures(self) -> int:
        """See there."""
        ...

    @property
    def n_retries(self) -> int:
        """See there."""
        ...

    @property
    def corrupted_by_path(self) -> Mapping[str, int]:
        """See there."""
        ...

    @property
    def n_live(self) -> int:
        """See there."""
        ...

    @property
    def n_connections(self) -> int:
        """See there."""
        ...

    @property
    def n_mappings(self) -> int:
        """See there."""
        ...

    @property
    def n_malformed(self) -> int:
        """See there."""
        ...

    @property
    def bytes_by_path(self) -> Mapping[tuple[str, str], int]:
        """See there."""
        ...


def transfer_engine_metrics(look: Callable[[], TransferCounts]) -> Callable[[], MetricSnapshot]:
    """Return a function that reports an engine's counters since the start of the process.

    The process that moves bytes counts them: a read counts at the reader, a write at the writer.
    The peer that is read from, or written to, counts nothing.
    """
    return lambda: _readings(look())


def _readings(counts: TransferCounts) -> MetricSnapshot:
    return {
        "halfmoon_transfer_bytes_total": (
            "Bytes of KV that this process moved, by path and direction.",
            LabelledValues(("path", "op"), dict(counts.bytes_by_path)),
        ),
        "halfmoon_transfers_total": (
            "Transfers that this process began and that ended.",
            by_label("result", {"done": counts.n_transfers, "failed": counts.n_failures}),
        ),
        "halfmoon_transfer_retries_total": (
            "Slices of transfers that were tried again.",
            counts.n_retries,
        ),
        "halfmoon_transfer_corrupted_total": (
            "Slices that arrived with other bytes than were sent, by path.",
            by_label("path", dict(counts.corrupted_by_path)),
        ),
        "halfmoon_transfers_live": ("Transfers that are under way.", counts.n_live),
        "halfmoon_transfer_connections": (
            "Open connections for payloads, dialled and accepted.",
            counts.n_connections,
        ),
        "halfmoon_transfer_mappings": (
            "Regions of other processes that are mapped here.",
            counts.n_mappings,
        ),
        "halfmoon_transfer_malformed_total": (
            "Connections that were closed because what came was not our framing.",
            counts.n_malformed,
        ),
    }
