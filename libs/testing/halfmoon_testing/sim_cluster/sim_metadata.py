"""Give each simulated process its own way to one metadata server, which may be down."""

from collections.abc import Callable

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.store_interface import MetadataError, MetadataUnreachable


class SimMetadataServer:
    """A metadata server, with what goes wrong with it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start empty."""
        self._clock = clock
        self.records = MemoryStore(clock)
        self.is_down = False
        #: Whether it takes no new values, as a Redis whose memory is full; leases are renewed.
        self.is_full = False

    def lose_everything(self) -> None:
        """Start again without any record."""
        self.records = MemoryStore(self._clock)


class SimStore:
    """A `MetadataStore` of one process."""

    def __init__(self, server: SimMetadataServer, can_reach: Callable[[], bool]) -> None:
        """Use the server while the process reaches it."""
        self._server = server
        self._can_reach = can_reach

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        return self._records.get(key)

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        self._require_room(key, value)
        self._records.put(key, value, ttl_s=ttl_s)

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        return self._records.delete(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`."""
        return self._records.list(prefix)

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        if value is not None:
            self._require_room(key, value)
        return self._records.compare_and_swap(key, expected, value, ttl_s=ttl_s)

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        self._require_room(key, b"")
        return self._records.increment(key)

    def close(self) -> None:
        """See `MetadataStore.close`."""

    def _require_room(self, key: str, value: bytes) -> None:
        if self._server.is_full and self._records.get(key) != value:
            raise MetadataError("the metadata server's memory is full")

    @property
    def _records(self) -> MemoryStore:
        if self._server.is_down or not self._can_reach():
            raise MetadataUnreachable("the metadata server does not answer")
        return self._server.records
