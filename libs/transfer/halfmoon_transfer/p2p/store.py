"""The P2P store's client: publish an object, get it, serve what was got, stop serving.

    publish      checksums → record with a gold holder
    get_replica  record → plan → transfers → checksums → our shards into the record, as they come
    drop         our replica leaves the record, then its regions are taken back
    unpublish    the same for gold: the object stays readable while replicas have all of it

A getter announces shards as they come, so it is a source long before it is done. Nobody is in
charge: a holder that died is removed from the record by whoever finds it out.
"""

import logging
import queue
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from halfmoon_metadata.store import MetadataError, MetadataStore
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece, Rejected, Transfer, TransferError
from halfmoon_transfer.p2p import record as records
from halfmoon_transfer.p2p.buffers import Buffers, checksum
from halfmoon_transfer.p2p.catalog import Catalog
from halfmoon_transfer.p2p.errors import (
    NameTaken,
    NotPublished,
    P2PError,
    Replaced,
    Unavailable,
    WrongBuffers,
)
from halfmoon_transfer.p2p.plan import Fetch, FetchPlan, Offer
from halfmoon_transfer.p2p.record import Holder, Record, Shard, Source, Summary
from halfmoon_transfer.p2p.settings import P2PSettings, shard_bytes_for

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from halfmoon_transfer.p2p.buffers import Given
    from halfmoon_transfer.regions import Memory

_log = logging.getLogger(__name__)
#: Between looks at the record while nobody can give what is missing.
_POLL_S = 0.05
#: How long a getter keeps to itself what it has from a replica: others can have it from there.
_ANNOUNCE_S = 0.2

Progress = Callable[[int], None]


class GetReport(msgspec.Struct, frozen=True):
    """How a get went."""

    n_bytes: int
    seconds: float
    #: Bytes that came from each segment, and were right.
    bytes_from: dict[str, int]
    #: Fetches that failed, and were done elsewhere or again.
    n_failures: int


class _Held(msgspec.Struct, frozen=True):
    """What this client serves."""

    publication: str
    gold: bool
    buffers: Buffers


class P2PStore:
    """One process's client. Methods block, and are safe from any thread."""

    def __init__(
        self,
        engine: TransferEngine,
        metadata: MetadataStore,
        settings: P2PSettings | None = None,
    ) -> None:
        """Use an engine and the metadata store it was opened with; both stay the caller's."""
        self._engine = engine
        self._catalog = Catalog(metadata)
        self._settings = settings or P2PSettings()
        self._source = Source(engine.name, engine.generation)
        self._lock = threading.Lock()
        #: By name; None while it is being published or fetched.
        self._held: dict[str, _Held | None] = {}

    def __enter__(self) -> "P2PStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What there is.

    def list(self, prefix: str = "") -> list[Summary]:
        """The objects whose names begin so, by name."""
        return [records.summary(each) for each in self._catalog.list(prefix)]

    def lookup(self, name: str) -> Record:
        """An object's record: the sizes of its buffers, its labels, its holders.

        Raises:
            NotPublished: there is none.
            MetadataError: the metadata store can't say.
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
        progress: Progress = lambda n_bytes: None,
    ) -> Record:
        """Offer an object; its bytes must stay as they are until it is unpublished.

        The same bytes under the same name may be published by several, and each is gold. A
        record all of whose holders are dead is replaced.

        Args:
            name: of the object, 1 to 200 printable characters.
            buffers: memory (peers get to read it), `Memory` of the engine (peers on this host
                map it, so they could write), or paths of files.
            labels: by buffer, what it is called; a folder's relative paths.
            shard_bytes: None: by the object's size, 1 to 64 MiB.
            replace: replace another object of this name.
            progress: called with bytes read, as checksums are made.

        Raises:
            NameTaken: another object has the name, or this client holds one of this name.
            ValueError: a name, labels or buffers that can't be.
            OSError: a file can't be read.
            MetadataError: the metadata store can't.
        """
        records.check_name(name)
        if labels and len(labels) != len(buffers):
            raise ValueError(f"{len(labels)} labels for {len(buffers)} buffers")
        self._reserve(name)
        regions: Buffers | None = None
        try:
            regions = Buffers.published(self._engine, buffers)
            sizes = regions.sizes
            shard_bytes = shard_bytes or shard_bytes_for(sum(sizes))
            shards = records.cut(sizes, shard_bytes)
            if len(shards) > records.MAX_SHARDS:
                raise ValueError(
                    f"object {name} would have {len(shards)} shards, the limit is "
                    f"{records.MAX_SHARDS}; make shards larger than {shard_bytes} bytes"
                )
            everything = records.bitmap(range(len(shards)), len(shards))
            own = Holder(self._source, True, tuple(regions.places), everything)
            record = Record(
                name=name,
                publication=secrets.token_hex(8),
                sizes=sizes,
                shard_bytes=shard_bytes,
                checksums=regions.checksums(shards, progress),
                holders=(own,),
                labels=tuple(labels),
            )
            after = self._catalog.change(
                name, lambda before: self._published(before, record, own, replace=replace)
            )
            assert after is not None
        except BaseException:
            self._release(name, regions)
            raise
        self._held[name] = _Held(after.publication, True, regions)
        return after

    def _published(
        self, before: Record | None, own: Record, holder: Holder, *, replace: bool
    ) -> Record:
        if before is None or replace:
            return own
        if before.same_content(own):
            return before.with_holder(holder)
        if all(self._catalog.is_gone(each.source) for each in before.holders):
            return own
        raise NameTaken(
            f"another object is published as {own.name}: {before.n_bytes} bytes in "
            f"{len(before.sizes)} buffers, held by {len(before.holders)}; remove it first"
        )

    def unpublish(self, name: str) -> None:
        """Stop offering an object that was published here; replicas go on serving it.

        When it returns, nobody reads the buffers any more.

        Raises:
            NotPublished: it was not published here.
            MetadataError: the metadata store can't; peers are refused all the same.
        """
        self._leave(name, gold=True)

    def remove(self, name: str) -> bool:
        """Delete an object's record, whoever holds it; whether there was one.

        Getters that are at it may still finish. Holders notice by `serving`.
        """
        return self._catalog.remove(name)

    def serving(self, name: str) -> bool:
        """Whether this client holds the object, and the record (still) says so.

        Raises:
            MetadataError: the metadata store can't say.
        """
        held = self._held.get(name)
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
        progress: Progress = lambda n_bytes: None,
    ) -> GetReport:
        """Fetch an object into buffers of its sizes, and serve it from there until dropped.

        Args:
            name: of the object.
            buffers: writable, as long as `lookup(name).sizes` says; left alone when it raises.
            progress: called with the bytes of each shard that is here and right.

        Raises:
            NotPublished: there is no such object.
            NameTaken: this client holds it already.
            WrongBuffers: they don't fit.
            Replaced: another object was published under the name meanwhile.
            Unavailable: nobody could give some shard.
            MetadataError: the metadata store can't say what there is.
        """
        self._reserve(name)
        regions: Buffers | None = None
        record: Record | None = None
        try:
            record = self.lookup(name)
            regions = Buffers.to_fill(self._engine, buffers)
            if regions.sizes != record.sizes:
                raise WrongBuffers(
                    f"object {name} has {len(record.sizes)} buffers of {record.n_bytes} bytes, "
                    f"given were {len(regions.sizes)} of {sum(regions.sizes)}, or cut otherwise"
                )
            getter = _Getter(self._engine, self._catalog, self._settings, record, regions, progress)
            report = getter.run()
        except BaseException:
            if record is not None:
                self._withdraw(record.name, record.publication)
            self._release(name, regions)
            raise
        self._held[name] = _Held(record.publication, False, regions)
        return report

    def drop(self, name: str) -> None:
        """Stop serving an object that was fetched here; its buffers are the caller's alone.

        Raises:
            NotPublished: it was not fetched here.
            MetadataError: the metadata store can't; peers are refused all the same.
        """
        self._leave(name, gold=False)

    # Leaving.

    def close(self) -> None:
        """Stop serving everything."""
        for name, held in list(self._held.items()):
            if held is not None:
                try:
                    self._leave(name, gold=held.gold)
                except MetadataError as error:
                    _log.warning("object %s stays in the metadata store: %s", name, error)

    def _leave(self, name: str, *, gold: bool) -> None:
        with self._lock:
            held = self._held.get(name)
            if held is None or held.gold is not gold:
                verb = "published" if gold else "fetched"
                raise NotPublished(
                    f"object {name} was not {verb} by segment {self._source.segment}"
                )
            del self._held[name]
        try:
            self._strike_out(name, held.publication)
        finally:
            held.buffers.close()

    def _strike_out(self, name: str, publication: str) -> None:
        """Take ourselves out of a record; the last one out takes the record along."""

        def change(before: Record | None) -> Record | None:
            if before is None or before.publication != publication:
                return before
            after = before.without({self._source})
            return after if after.holders else None

        self._catalog.change(name, change)

    def _withdraw(self, name: str, publication: str) -> None:
        try:
            record = self._catalog.read(name)
            if record is not None and record.holder(self._source) is not None:
                self._strike_out(name, publication)
        except (MetadataError, P2PError) as error:
            _log.warning("our part of object %s stays in the metadata store: %s", name, error)

    def _reserve(self, name: str) -> None:
        with self._lock:
            if name in self._held:
                raise NameTaken(f"segment {self._source.segment} holds object {name} already")
            self._held[name] = None

    def _release(self, name: str, regions: Buffers | None) -> None:
        if regions is not None:
            regions.close()
        with self._lock:
            self._held.pop(name, None)


class _Getter:
    """One get: performs what its plan says, and tells the record."""

    def __init__(
        self,
        engine: TransferEngine,
        catalog: Catalog,
        settings: P2PSettings,
        record: Record,
        buffers: Buffers,
        progress: Progress,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._settings = settings
        self._buffers = buffers
        self._progress = progress
        self._source = Source(engine.name, engine.generation)
        #: The newest that we have seen.
        self._record = record
        self._shards: tuple[Shard, ...] = records.cut(record.sizes, record.shard_bytes)
        self._plan = FetchPlan(len(self._shards), settings)
        self._dice = random.Random()
        #: When we last changed or read the record, and whether nothing came since.
        self._heard_at = time.monotonic()
        self._fresh = True
        #: Transfers that are over.
        self._over: queue.SimpleQueue[tuple[Fetch, Transfer]] = queue.SimpleQueue()
        self._live: set[Transfer] = set()
        self._bytes_from: Counter[str] = Counter()
        self._n_failures = 0

    def run(self) -> GetReport:
        """Until all shards are here, and said to be."""
        started = time.monotonic()
        try:
            self._fetch_all()
        finally:
            self._stop()
        self._announce()
        self._clean(self._plan.suspects)
        return GetReport(
            n_bytes=self._record.n_bytes,
            seconds=time.monotonic() - started,
            bytes_from=dict(self._bytes_from),
            n_failures=self._n_failures,
        )

    def _fetch_all(self) -> None:
        stuck_until: float | None = None
        while not self._plan.done:
            self._start_what_can_be()
            if self._plan.n_in_flight:
                stuck_until = None
                self._land(*self._over.get())
                while not self._over.empty():
                    self._land(*self._over.get())
            else:
                now = time.monotonic()
                stuck_until = stuck_until or now + self._settings.patience_s
                if now >= stuck_until:
                    raise Unavailable(f"object {self._record.name}: {self._plan.why_stuck()}")
                time.sleep(_POLL_S)
                self._fresh = False

    def _start_what_can_be(self) -> None:
        """Fill the plan's room. Before gold is asked, we look what others have by now."""
        if time.monotonic() >= self._heard_at + _ANNOUNCE_S:
            self._announce()
        while not self._plan.full:
            self._plan.on_offers(self._offers())
            fetch = self._plan.next(self._dice.randrange, gold_too=self._fresh)
            if fetch is not None:
                self._start(fetch)
            elif self._fresh:
                return
            else:
                self._announce()

    def _offers(self) -> list[Offer]:
        return [
            Offer(each.source, each.gold, each.shards)
            for each in self._record.holders
            if each.source != self._source
        ]

    def _start(self, fetch: Fetch) -> None:
        shard = self._shards[fetch.shard]
        holder = self._record.holder(fetch.source)
        landing = self._buffers.landings[shard.buffer]
        assert holder is not None and landing is not None
        place = holder.places[shard.buffer]
        assert place is not None, "checked when the record was read"
        piece = Piece(
            landing, shard.offset, place.region, place.offset + shard.offset, shard.length
        )
        transfer = self._engine.submit("read", [piece], self._settings.shard_timeout_s)
        self._live.add(transfer)
        transfer.add_done_callback(lambda done: self._over.put((fetch, done)))

    def _land(self, fetch: Fetch, transfer: Transfer) -> None:
        """One fetch is over: look at what came."""
        self._fresh = False
        self._live.discard(transfer)
        shard = self._shards[fetch.shard]
        segment = fetch.source.segment
        try:
            transfer.result(0)
        except Rejected as error:
            # Its owner says so: asking again won't help.
            self._fail(fetch, str(error), gone=True)
        except TransferError as error:
            self._fail(fetch, str(error), gone=False)
        else:
            if checksum(self._buffers.view(shard)) != self._record.checksums[shard.index]:
                reason = f"shard {shard.index} came with another checksum than was published"
                self._fail(fetch, reason, gone=False)
                return
            self._plan.on_fetched(fetch.shard)
            self._bytes_from[segment] += shard.length
            self._progress(shard.length)

    def _fail(self, fetch: Fetch, reason: str, *, gone: bool) -> None:
        self._n_failures += 1
        self._plan.on_failed(fetch.shard, reason, gone=gone)
        _log.info("shard %d from %s: %s", fetch.shard, fetch.source.segment, reason)
        if gone:
            self._clean(frozenset({fetch.source}))

    def _announce(self) -> None:
        """Say what we have, and hear what others have; the get goes on if that fails."""
        self._heard_at = time.monotonic()
        self._fresh = True
        here = self._plan.here
        holder = Holder(
            self._source,
            False,
            tuple(self._buffers.places),
            records.bitmap(here, len(self._shards)),
        )

        def change(before: Record | None) -> Record | None:
            if before is None or before.publication != self._record.publication:
                return before
            return before.with_holder(holder) if here or self._plan.done else before

        self._hear(change)

    def _clean(self, suspects: frozenset[Source]) -> None:
        """Take those holders out of the record whose segment is over."""

        def change(before: Record | None) -> Record | None:
            if before is None or before.publication != self._record.publication:
                return before
            return before.without(filter(self._catalog.is_gone, suspects))

        if suspects:
            self._hear(change)

    def _hear(self, change: Callable[[Record | None], Record | None]) -> None:
        try:
            after = self._catalog.change(self._record.name, change)
        except (MetadataError, P2PError) as error:
            _log.warning("object %s: %s", self._record.name, error)
            return
        if after is not None and after.publication == self._record.publication:
            self._record = after
        elif after is not None and not self._plan.done:
            raise Replaced(f"another object was published as {after.name} while it was fetched")

    def _stop(self) -> None:
        """Nothing writes into the buffers any more."""
        for transfer in self._live:
            transfer.cancel()
        for transfer in self._live:
            try:
                transfer.result()
            except TransferError:
                continue
