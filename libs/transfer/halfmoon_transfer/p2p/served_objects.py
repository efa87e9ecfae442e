"""Keep the objects that one client serves, by name; a name is reserved before its first byte."""

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
    """An object that this client serves."""

    publication: str
    gold: bool
    buffers: ObjectBuffers


class ServedObjects:
    """The served objects by name. All methods are safe from any thread."""

    def __init__(self, catalog: ObjectCatalog, own: ShardSource) -> None:
        self._catalog = catalog
        self._own = own
        self._lock = threading.Lock()
        #: None while the object is being published or fetched.
        self._held: dict[str, ServedObject | None] = {}

    def get(self, name: str) -> ServedObject | None:
        """Return the object that is served under this name, or None."""
        return self._held.get(name)

    def reserve(self, name: str) -> None:
        """Reserve a name before publishing or fetching; `keep` or `release` must follow.

        Raises:
            NameTaken: this client holds the name already.
        """
        with self._lock:
            if name in self._held:
                raise NameTaken(f"segment {self._own.segment} holds object {name} already")
            self._held[name] = None

    def keep(self, name: str, held: ServedObject) -> None:
        """Serve an object under its reserved name."""
        with self._lock:
            self._held[name] = held

    def release(self, name: str, buffers: ObjectBuffers | None) -> None:
        """Free a reserved name after a failure."""
        if buffers is not None:
            buffers.close()
        with self._lock:
            self._held.pop(name, None)

    def stop(self, name: str, *, gold: bool) -> None:
        """Leave the record, then unregister the regions; no peer reads the buffers afterwards.

        Raises:
            NotPublished: the object was not published (`gold`) or fetched here.
            MetadataError: the metadata store fails; the regions are unregistered all the same.
        """
        with self._lock:
            held = self._held.get(name)
            if held is None or held.gold is not gold:
                verb = "published" if gold else "fetched"
                raise NotPublished(f"object {name} was not {verb} by segment {self._own.segment}")
            del self._held[name]
        try:
            self._leave_record(name, held.publication)
        finally:
            held.buffers.close()

    def retract(self, record: ObjectRecord) -> None:
        """Leave the record of a get that failed; log it if the store fails."""
        try:
            now = self._catalog.read(record.name)
            if now is not None and now.holder(self._own) is not None:
                self._leave_record(record.name, record.publication)
        except (MetadataError, P2PError) as error:
            _log.warning(
                "our part of object %s stays in the metadata store: %s", record.name, error
            )

    def _leave_record(self, name: str, publication: str) -> None:
        """Remove our entry from a record; delete the record when no holder is left."""

        def change(before: ObjectRecord | None) -> ObjectRecord | None:
            if before is None or before.publication != publication:
                return before
            after = before.without({self._own})
            return after if after.holders else None

        self._catalog.change(name, change)

    def close(self) -> None:
        """Stop serving all objects."""
        for name, held in list(self._held.items()):
            if held is not None:
                try:
                    self.stop(name, gold=held.gold)
                except MetadataError as error:
                    _log.warning("object %s stays in the metadata store: %s", name, error)
