"""What one client serves: each object's name once, from before its first byte to after its last."""

import logging
import threading

import msgspec

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_transfer.p2p.object_buffers import ObjectBuffers
from halfmoon_transfer.p2p.object_catalog import ObjectCatalog
from halfmoon_transfer.p2p.object_record import ObjectRecord, ShardSource
from halfmoon_transfer.p2p.p2p_errors import NameTaken, NotPublished, P2PError

_log = logging.getLogger(__name__)


class ServedObject(msgspec.Struct, frozen=True):
    """An object that is served."""

    publication: str
    gold: bool
    buffers: ObjectBuffers


class ServedObjects:
    """By name. All methods are safe from any thread."""

    def __init__(self, catalog: ObjectCatalog, own: ShardSource) -> None:
        self._catalog = catalog
        self._own = own
        self._lock = threading.Lock()
        #: None while it is being published or fetched.
        self._held: dict[str, ServedObject | None] = {}

    def get(self, name: str) -> ServedObject | None:
        """What is served under this name."""
        return self._held.get(name)

    def reserve(self, name: str) -> None:
        """Take a name, for what is being published or fetched; `keep` or `release` follows.

        Raises:
            NameTaken: it is held already.
        """
        with self._lock:
            if name in self._held:
                raise NameTaken(f"segment {self._own.segment} holds object {name} already")
            self._held[name] = None

    def keep(self, name: str, held: ServedObject) -> None:
        """It is served from now on."""
        with self._lock:
            self._held[name] = held

    def release(self, name: str, buffers: ObjectBuffers | None) -> None:
        """It came to nothing."""
        if buffers is not None:
            buffers.close()
        with self._lock:
            self._held.pop(name, None)

    def leave(self, name: str, *, gold: bool) -> None:
        """Leave the record, then take the regions back: nobody reads the buffers any more.

        Raises:
            NotPublished: it was not published (`gold`) or fetched here.
            MetadataError: the metadata store can't; the regions are taken back all the same.
        """
        with self._lock:
            held = self._held.get(name)
            if held is None or held.gold is not gold:
                verb = "published" if gold else "fetched"
                raise NotPublished(f"object {name} was not {verb} by segment {self._own.segment}")
            del self._held[name]
        try:
            self._strike_out(name, held.publication)
        finally:
            held.buffers.close()

    def retract(self, record: ObjectRecord) -> None:
        """Leave the record of what was announced and came to nothing, if it can be had."""
        try:
            now = self._catalog.read(record.name)
            if now is not None and now.holder(self._own) is not None:
                self._strike_out(record.name, record.publication)
        except (MetadataError, P2PError) as error:
            _log.warning(
                "our part of object %s stays in the metadata store: %s", record.name, error
            )

    def _strike_out(self, name: str, publication: str) -> None:
        """Take ourselves out of a record; the last one out takes the record along."""

        def change(before: ObjectRecord | None) -> ObjectRecord | None:
            if before is None or before.publication != publication:
                return before
            after = before.without({self._own})
            return after if after.holders else None

        self._catalog.change(name, change)

    def close(self) -> None:
        """Leave everything."""
        for name, held in list(self._held.items()):
            if held is not None:
                try:
                    self.leave(name, gold=held.gold)
                except MetadataError as error:
                    _log.warning("object %s stays in the metadata store: %s", name, error)
