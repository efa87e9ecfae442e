"""Publish our Mooncake records and look up others: by metadata server or by address."""

import logging
import threading

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_metadata.store_registry import open_store
from halfmoon_metadata.tls_trust import tls_ca_from_environment
from halfmoon_transfer.backends.addresses import join_address, split_address
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_records import P2P, RpcRecord, SegmentRecord
from halfmoon_transfer.interface import Lost
from halfmoon_transfer.settings import MooncakeSettings

_log = logging.getLogger(__name__)


class MooncakeRegistry:
    """The published records of all segments. Calls may block on the metadata server.

    Records have no lease, because Mooncake's servers have none. The next start of the same
    name overwrites the records that a crash left behind.
    """

    def __init__(self, settings: MooncakeSettings, name: str, rpc: RpcRecord) -> None:
        """Open the store, without publishing yet.

        Args:
            settings: the store and the names of our keys.
            name: our segment's name if `settings` has none.
            rpc: the address of our handshake port.

        Raises:
            ValueError: the metadata URL can't be used.
        """
        #: True without a metadata server; then a segment's name is its address.
        self.is_p2p = settings.metadata == P2P
        #: None without a metadata server, and once the records are withdrawn.
        self._store: MetadataStore | None = None
        self._cluster = settings.cluster
        self._rpc = rpc
        #: Held while a record is built and published, so that the newest record stays.
        self.lock = threading.Lock()
        if self.is_p2p:
            self.name = join_address(rpc.ip_or_host_name, rpc.rpc_port)
        else:
            self._store = open_store(settings.metadata, tls_ca=tls_ca_from_environment())
            self.name = settings.name or name

    def announce(self, record: SegmentRecord) -> None:
        """Write our segment record; with `lock` held.

        Raises:
            MetadataError: the server fails.
        """
        if self._store is not None:
            self._store.put(
                mooncake_records.segment_key(self.name, self._cluster),
                mooncake_records.encode(record),
            )

    def announce_rpc(self) -> None:
        """Write the address of our handshake port.

        Some of Mooncake's servers refuse to overwrite this record, so the record of an earlier
        start is removed first.

        Raises:
            MetadataError: the server fails.
        """
        if self._store is not None:
            key = mooncake_records.rpc_key(self.name, self._cluster)
            self._store.delete(key)
            self._store.put(key, mooncake_records.encode(self._rpc))

    def withdraw(self) -> None:
        """Remove our records, unless another process has overwritten them; close the store."""
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
        """Return host and port of a segment's handshake port.

        Raises:
            ValueError: there is no metadata server and the name is not "host:port".
            Lost: the metadata server does not have the segment, or fails.
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
        """Return a segment's record from the metadata server; needs one, see `is_p2p`.

        Raises:
            Lost: the metadata server does not have the segment, or fails.
            RecordError: the value is not the record of a TCP segment.
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
