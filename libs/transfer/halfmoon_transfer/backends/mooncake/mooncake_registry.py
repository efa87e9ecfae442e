"""How Mooncake segments find each other: a metadata server, or by their handshake address."""

import logging
import threading

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_metadata.store_registry import open_store
from halfmoon_transfer.backends.addresses import join_address, split_address
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_records import P2P, RpcRecord, SegmentRecord
from halfmoon_transfer.interface import Lost
from halfmoon_transfer.settings import MooncakeSettings

_log = logging.getLogger(__name__)


class MooncakeRegistry:
    """Our records, and those of others. Calls may block on the metadata server.

    Records have no lease: Mooncake's servers know none. What a crash left behind is
    overwritten by the next start of the same name.
    """

    def __init__(self, settings: MooncakeSettings, name: str, rpc: RpcRecord) -> None:
        """Open the store; nothing is announced yet.

        Args:
            settings: which store, which keys.
            name: our segment's name if `settings` has none.
            rpc: where our handshake port is.

        Raises:
            ValueError: a metadata URL that can't be used.
        """
        #: Whether there is no metadata server, and a segment's name is its address.
        self.is_p2p = settings.metadata == P2P
        #: None also once the records are withdrawn.
        self._store: MetadataStore | None = None
        self._cluster = settings.cluster
        self._rpc = rpc
        #: Hold it while making a record and announcing it, so that the last one made stays.
        self.lock = threading.Lock()
        if self.is_p2p:
            self.name = join_address(rpc.ip_or_host_name, rpc.rpc_port)
        else:
            self._store = open_store(settings.metadata)
            self.name = settings.name or name

    def announce(self, record: SegmentRecord) -> None:
        """Write our segment record; with `lock` held.

        Raises:
            MetadataError: the server can't.
        """
        if self._store is not None:
            self._store.put(
                mooncake_records.segment_key(self.name, self._cluster),
                mooncake_records.encode(record),
            )

    def announce_rpc(self) -> None:
        """Write where our handshake port is.

        Some of Mooncake's servers refuse to overwrite this one, so what an earlier start left
        is removed first.

        Raises:
            MetadataError: the server can't.
        """
        if self._store is not None:
            key = mooncake_records.rpc_key(self.name, self._cluster)
            self._store.delete(key)
            self._store.put(key, mooncake_records.encode(self._rpc))

    def withdraw(self) -> None:
        """Remove our records, unless another process has written them over; let go of the store."""
        store, self._store = self._store, None
        if store is None:
            return
        key = mooncake_records.rpc_key(self.name, self._cluster)
        try:
            if store.get(key) == mooncake_records.encode(self._rpc):
                store.delete(key)
                store.delete(mooncake_records.segment_key(self.name, self._cluster))
        except MetadataError as error:
            _log.warning("Mooncake segment %s stays in the metadata server: %s", self.name, error)
        finally:
            store.close()

    def rpc_address(self, name: str) -> tuple[str, int]:
        """Where a segment's handshake port is.

        Raises:
            ValueError: without a server, a name that is not "host:port".
            Lost: it is not in the metadata server, or that can't say.
        """
        if self.is_p2p:
            host, port = split_address(name, 0)
            if not port:
                raise ValueError(f"without a metadata server a segment is host:port, not {name!r}")
            return host, port
        rpc = mooncake_records.decode_rpc(
            self._get(mooncake_records.rpc_key(name, self._cluster), name)
        )
        return rpc.ip_or_host_name, rpc.rpc_port

    def record(self, name: str) -> SegmentRecord:
        """A segment's record, from the metadata server (with one; see `is_p2p`).

        Raises:
            Lost: it is not there, or the server can't say.
            RecordError: it is no record of a TCP segment.
        """
        return mooncake_records.decode_segment(
            self._get(mooncake_records.segment_key(name, self._cluster), name)
        )

    def _get(self, key: str, name: str) -> bytes:
        if self._store is None:
            raise Lost(f"Mooncake segment {name} can't be looked up: the engine is closed")
        try:
            value = self._store.get(key)
        except MetadataError as error:
            raise Lost(f"Mooncake segment {name} can't be looked up: {error}") from error
        if value is None:
            raise Lost(f"Mooncake segment {name} is not in the metadata server: no record {key}")
        return value
