"""Publish objects, fetch them, serve them to other clients, and stop serving.

    publish      compute checksums, write a record with a gold holder
    get_replica  fetch the object, become a holder in the record
    drop         remove our replica from the record, then unregister its regions
    unpublish    the same for gold; the object stays readable while replicas have all of it

There is no server: clients agree through one record per object in the metadata store.
"""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.p2p import object_record as records
from halfmoon_transfer.p2p.object_buffers import ObjectBuffers
from halfmoon_transfer.p2p.object_catalog import ObjectCatalog
from halfmoon_transfer.p2p.object_getter import GetReport, ObjectGetter, ProgressCallback
from halfmoon_transfer.p2p.object_record import (
    ObjectRecord,
    ObjectSummary,
    ShardHolder,
    ShardSource,
)
from halfmoon_transfer.p2p.p2p_errors import NameTaken, NotPublished, WrongBuffers
from halfmoon_transfer.p2p.p2p_settings import P2PSettings, shard_bytes_for
from halfmoon_transfer.p2p.served_objects import ServedObject, ServedObjects
from halfmoon_transfer.p2p.shared_record import SharedRecord

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from halfmoon_transfer.p2p.object_buffers import Given
    from halfmoon_transfer.regions.region_table import Memory


class P2PStore:
    """The P2P client of one process. Methods block, and are safe from any thread."""

    def __init__(
        self,
        engine: TransferEngine,
        metadata: MetadataStore,
        settings: P2PSettings | None = None,
    ) -> None:
        """Use an engine and the metadata store it was opened with; both stay the caller's."""
        self._engine = engine
        self._catalog = ObjectCatalog(metadata)
        self._settings = settings or P2PSettings()
        self._source = ShardSource(engine.name, engine.generation)
        self._served = ServedObjects(self._catalog, self._source)

    def __enter__(self) -> "P2PStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Lookup.

    def list(self, prefix: str = "") -> list[ObjectSummary]:
        """Return the objects whose names have this prefix, by name."""
        return [records.summarize(each) for each in self._catalog.list(prefix)]

    def lookup(self, name: str) -> ObjectRecord:
        """Return an object's record: the sizes of its buffers, its labels, its holders.

        Raises:
            NotPublished: there is none.
            MetadataError: the metadata store fails.
        """
        record = self._catalog.read(name)
        if record is None:
            raise NotPublished(f"there is no object {name} in the metadata store")
        return record

    # Publishing.

    def publish(
        self,
        name: str,
        buffers: "Sequence[Given]",
        *,
        labels: Sequence[str] = (),
        shard_bytes: int | None = None,
        replace: bool = False,
        progress: ProgressCallback = lambda n_bytes: None,
    ) -> ObjectRecord:
        """Offer an object; its bytes must not change until it is unpublished.

        Several clients may publish the same bytes under the same name; each is gold. A record
        is replaced when all its holders are dead.

        Args:
            name: the object's name, 1 to 200 printable characters.
            buffers: memory (peers get to read it), `Memory` of the engine (peers on this host
                map it, so they could write), or paths of files.
            labels: by buffer, its label; for a folder the relative path of the file.
            shard_bytes: bytes of a shard; None derives 1 to 64 MiB from the object's size.
            replace: replace another object of this name.
            progress: called with the bytes of each shard whose checksum was computed.

        Raises:
            NameTaken: another object has the name, or this client holds one of this name.
            ValueError: the name, labels or buffers are not valid.
            OSError: a file can't be read.
            MetadataError: the metadata store fails.
        """
        records.check_object_name(name)
        if labels and len(labels) != len(buffers):
            raise ValueError(f"{len(labels)} labels for {len(buffers)} buffers")
        self._served.reserve(name)
        regions: ObjectBuffers | None = None
        try:
            regions = ObjectBuffers.published(self._engine, buffers)
            record = self._new_record(name, regions, labels, shard_bytes, progress)
            after = self._catalog.change(
                name, lambda before: self._merge(before, record, replace=replace)
            )
            assert after is not None
        except BaseException:
            self._served.release(name, regions)
            raise
        self._served.keep(name, ServedObject(after.publication, True, regions))
        return after

    def _new_record(
        self,
        name: str,
        regions: ObjectBuffers,
        labels: Sequence[str],
        shard_bytes: int | None,
        progress: ProgressCallback,
    ) -> ObjectRecord:
        """Build the record of an object that this client alone holds."""
        sizes = regions.sizes
        shard_bytes = shard_bytes or shard_bytes_for(sum(sizes))
        shards = records.cut_shards(sizes, shard_bytes)
        if len(shards) > records.MAX_SHARDS:
            raise ValueError(
                f"object {name} would have {len(shards)} shards, the limit is "
                f"{records.MAX_SHARDS}; make shards larger than {shard_bytes} bytes"
            )
        everything = records.bitmap(range(len(shards)), len(shards))
        return ObjectRecord(
            name=name,
            publication=secrets.token_hex(8),
            sizes=sizes,
            shard_bytes=shard_bytes,
            checksums=regions.checksums(shards, progress),
            holders=(ShardHolder(self._source, True, tuple(regions.places), everything),),
            labels=tuple(labels),
        )

    def _merge(
        self, before: ObjectRecord | None, own: ObjectRecord, *, replace: bool
    ) -> ObjectRecord:
        """Join or replace the current record; raise `NameTaken` if another object is alive."""
        if before is None or replace:
            return own
        if before.same_content(own):
            return before.with_holder(*own.holders)
        if all(self._catalog.is_gone(each.source) for each in before.holders):
            return own
        raise NameTaken(
            f"another object is published as {own.name}: {before.n_bytes} bytes in "
            f"{len(before.sizes)} buffers, held by {len(before.holders)}; remove it first"
        )

    def unpublish(self, name: str) -> None:
        """Stop serving an object that was published here; replicas go on serving it.

        After it returns, no peer reads the buffers.

        Raises:
            NotPublished: it was not published here.
            MetadataError: the metadata store fails; peers are refused all the same.
        """
        self._served.stop(name, gold=True)

    def remove(self, name: str) -> bool:
        """Delete an object's record for all its holders; return True if there was one.

        Getters of the object may still finish. Holders notice by `serving`.
        """
        return self._catalog.remove(name)

    def serving(self, name: str) -> bool:
        """Return True if this client holds the object and the record (still) says so.

        Raises:
            MetadataError: the metadata store fails.
        """
        held = self._served.get(name)
        if held is None:
            return False
        record = self._catalog.read(name)
        return (
            record is not None
            and record.publication == held.publication
            and record.holder(self._source) is not None
        )

    # Getting.

    def get_replica(
        self,
        name: str,
        buffers: "Sequence[Buffer | Memory]",
        *,
        progress: ProgressCallback = lambda n_bytes: None,
    ) -> GetReport:
        """Fetch an object into buffers of its sizes, and serve it from there until dropped.

        Args:
            name: the object's name.
            buffers: writable, of the sizes in `lookup(name).sizes`; unused once it has raised.
            progress: called with the bytes of each shard that arrived and was verified.

        Raises:
            NotPublished: there is no such object.
            NameTaken: this client holds it already.
            WrongBuffers: the buffers don't fit the object.
            ObjectReplaced: another object was published under the name meanwhile.
            ShardUnavailable: no holder could deliver some shard.
            MetadataError: the metadata store can't be read.
        """
        self._served.reserve(name)
        regions: ObjectBuffers | None = None
        record: ObjectRecord | None = None
        try:
            record = self.lookup(name)
            regions = ObjectBuffers.to_fill(self._engine, buffers)
            if regions.sizes != record.sizes:
                raise WrongBuffers(
                    f"object {name} has {len(record.sizes)} buffers of {record.n_bytes} bytes, "
                    f"given were {len(regions.sizes)} of {sum(regions.sizes)}, or cut otherwise"
                )
            shared = SharedRecord(self._catalog, record, self._source, tuple(regions.places))
            getter = ObjectGetter(self._engine, shared, regions, self._settings, progress)
            report = getter.run()
        except BaseException:
            if record is not None:
                self._served.retract(record)
            self._served.release(name, regions)
            raise
        self._served.keep(name, ServedObject(record.publication, False, regions))
        return report

    def drop(self, name: str) -> None:
        """Stop serving an object that was fetched here; its buffers are the caller's alone then.

        Raises:
            NotPublished: it was not fetched here.
            MetadataError: the metadata store fails; peers are refused all the same.
        """
        self._served.stop(name, gold=False)

    def close(self) -> None:
        """Stop serving everything."""
        self._served.close()
