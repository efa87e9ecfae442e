"""Count the transfers and bytes of an engine."""

import threading
from collections.abc import Sequence

import msgspec

from halfmoon_transfer.backends.backend_interface import BackendGauges
from halfmoon_transfer.interface import Op
from halfmoon_transfer.planning.transfer_plan import Batch, OutcomeKind, SliceOutcome


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was opened, and gauges of now."""

    #: Transfers that ended well, and the bytes they moved.
    n_transfers: int
    bytes_read: int
    bytes_written: int
    #: Bytes applied, by path and direction: those of transfers that ended in an error too.
    bytes_by_path: dict[tuple[str, str], int]
    #: Transfers that ended in an error.
    n_failures: int
    #: Slices that were tried again.
    n_retries: int
    #: Slices that arrived with other bytes, by path. Each is tried again, or its transfer ends.
    corrupted_by_path: dict[str, int]
    #: Transfers submitted and not done.
    n_live: int
    #: Regions registered here.
    n_regions: int
    #: Connections open now, both dialled and accepted.
    n_connections: int
    #: Regions of other processes mapped now.
    n_mappings: int
    #: Connections closed because what came was not our framing.
    n_malformed: int


def applied_bytes(batch: Batch, outcomes: Sequence[SliceOutcome]) -> int:
    """Return the bytes of a batch's slices that were applied."""
    pairs = zip(batch.slices, outcomes, strict=True)
    return sum([each.length for each, outcome in pairs if outcome.kind is OutcomeKind.APPLIED])


def corrupted_slices(outcomes: Sequence[SliceOutcome]) -> int:
    """Return how many slices of a batch arrived with other bytes."""
    return sum([each.kind is OutcomeKind.CORRUPTED for each in outcomes])


class TransferCounters:
    """The counters of one engine. Methods are safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_transfers = 0
        #: Bytes of transfers that succeeded.
        self._n_bytes: dict[Op, int] = {"read": 0, "write": 0}
        self._n_carried: dict[tuple[str, str], int] = {}
        self._n_corrupted: dict[str, int] = {}
        self._n_failures = 0
        self._n_retries = 0

    def on_carried(self, path: str, op: Op, n_bytes: int) -> None:
        """Count bytes that were applied over a path."""
        with self._lock:
            self._n_carried[path, op] = self._n_carried.get((path, op), 0) + n_bytes

    def on_corrupted(self, path: str, n_slices: int) -> None:
        """Count slices that arrived with other bytes."""
        if n_slices:
            with self._lock:
                self._n_corrupted[path] = self._n_corrupted.get(path, 0) + n_slices

    def on_done(self, op: Op, n_bytes: int, n_retries: int = 0) -> None:
        """Count a transfer that succeeded."""
        with self._lock:
            self._n_transfers += 1
            self._n_bytes[op] += n_bytes
            self._n_retries += n_retries

    def on_failed(self, n_retries: int) -> None:
        """Count a transfer that failed."""
        with self._lock:
            self._n_failures += 1
            self._n_retries += n_retries

    def stats(
        self, gauges: Sequence[BackendGauges], *, n_live: int, n_regions: int
    ) -> TransferStats:
        """Return the counters, with the gauges of the backends and the engine."""
        with self._lock:
            return TransferStats(
                n_transfers=self._n_transfers,
                bytes_read=self._n_bytes["read"],
                bytes_written=self._n_bytes["write"],
                bytes_by_path=dict(self._n_carried),
                n_failures=self._n_failures,
                n_retries=self._n_retries,
                corrupted_by_path=dict(self._n_corrupted),
                n_live=n_live,
                n_regions=n_regions,
                n_connections=sum(each.n_connections for each in gauges),
                n_mappings=sum(each.n_mappings for each in gauges),
                n_malformed=sum(each.n_malformed for each in gauges),
            )
