"""The transfer engine: what services hold. It builds the parts and performs plans' commands.

    submit -> Plan -> Resolve -> Directory -> paths
                   -> Carry   -> Couriers  -> Backend.carry -> outcomes -> Plan -> …
                   -> Finish  -> the waiters

Threads inside, no event loop: sockets and copies release the interpreter, and an asyncio
caller is woken once per transfer.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path as FilePath
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from halfmoon_metadata.store import MetadataStore
from halfmoon_protocol.regions import KEY_BYTES, Region
from halfmoon_transfer.backends import open_backend
from halfmoon_transfer.backends.interface import (
    AtOnce,
    Backend,
    Errand,
    Home,
    Unavailable,
    all_of,
)
from halfmoon_transfer.backends.memory import MemoryBackend
from halfmoon_transfer.couriers import Couriers
from halfmoon_transfer.deadlines import Deadlines
from halfmoon_transfer.descriptor import Endpoint, SegmentDescriptor, check_name
from halfmoon_transfer.directory import Directory
from halfmoon_transfer.express import Finished, one_batch
from halfmoon_transfer.interface import (
    MAX_NOTIFICATION_BYTES,
    Cancelled,
    Lost,
    Notification,
    Op,
    Overloaded,
    Piece,
    Rejected,
    Report,
    Transfer,
    TransferError,
)
from halfmoon_transfer.lease import Lease
from halfmoon_transfer.notifications import Inbox
from halfmoon_transfer.plan import (
    APPLIED,
    Batch,
    Carry,
    Command,
    Fate,
    Finish,
    Limits,
    Notice,
    Outcome,
    Path,
    PeerKey,
    Plan,
    Resolve,
)
from halfmoon_transfer.region_file import RegionFile
from halfmoon_transfer.regions import Entry, Memory, Refused, RegionTable, Status
from halfmoon_transfer.settings import TransferSettings
from halfmoon_transfer.stats import TransferStats
from halfmoon_transfer.stop import StopSignal
from halfmoon_transfer.topology import Topology
from halfmoon_transfer.transfer import LiveTransfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from halfmoon_transfer.backends.faults import Faults

_log = logging.getLogger(__name__)
#: How long a polite wait for a removed region's last access is; then connections are cut.
_POLITE_S = 1.0
#: What offsets and generations on a wire can be.
_MAX_REGION_BYTES = 2**63 - 1
_GENERATIONS = range(2**63)


class TransferEngine:
    """One process's segment: its regions, its ways to peers, its live transfers.

    All methods are safe from any thread. `open` and `close` block; so may `view` and
    `unregister`; `submit` never waits for a peer.
    """

    def __init__(
        self, home: Home, backends: Sequence["str | Faults"], directory: Directory
    ) -> None:
        """Use `open`."""
        self._home = home
        self._regions = home.regions
        self._settings = home.settings
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        #: Submitted and not done.
        self._live: set[LiveTransfer] = set()
        self._all_done = threading.Condition(self._lock)
        self._closed = False
        self._counts = {"read": 0, "write": 0, "done": 0, "failed": 0, "retries": 0}
        self._limits = Limits(
            home.settings.batch_bytes, home.settings.batch_slices, home.settings.tries_per_path
        )
        with ExitStack() as undo:
            self._backends: dict[str, Backend] = {}
            for choice in backends:
                try:
                    backend = open_backend(_required(choice), home)
                except Unavailable as error:
                    if choice == _required(choice):
                        raise
                    _log.debug("%s is left out: %s", choice, error)
                    continue
                undo.callback(backend.close)
                self._backends[backend.name] = backend
            endpoints: dict[str, Endpoint] = {}
            for backend in self._backends.values():
                endpoints |= backend.endpoints
            self.descriptor = SegmentDescriptor(home.name, home.generation, home.host_id, endpoints)
            self._publish()
            undo.pop_all()
        # Our own regions are reached by a copy, whatever the peers use.
        self._own_key = PeerKey(home.name, home.generation)
        self._own = MemoryBackend(home)
        self._own_descriptor = msgspec.structs.replace(
            self.descriptor, endpoints=self._own.endpoints
        )
        #: By path: whether a batch is a mere copy. `isinstance` with a protocol is slow.
        self._at_once = {
            backend.name: backend.at_once
            for backend in (*self._backends.values(), self._own)
            if isinstance(backend, AtOnce)
        }
        #: For what can't be stopped as it is over at once.
        self._never = StopSignal.after(float("inf"))
        label = f"halfmoon-transfer-{home.name}"
        self._couriers = Couriers(label, threads=home.settings.threads, lanes=home.settings.lanes)
        self._deadlines: Deadlines[LiveTransfer] = Deadlines(f"{label}-deadlines", self._on_overdue)
        self._lease = Lease(f"{label}-lease", self._publish, home.settings.lease_s)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        metadata: MetadataStore,
        generation: int | None = None,
        backends: Sequence["str | Faults"] = ("shm", "tcp"),
        bind: str | Sequence[str] = "127.0.0.1",
        port: int = 0,
        advertise: str | Sequence[str] | None = None,
        host_id: str | None = None,
        topology: Topology | None = None,
        settings: TransferSettings | None = None,
    ) -> "TransferEngine":
        """Open a segment and publish how it is reached.

        Args:
            name: the segment's name, unique in the metadata store.
            metadata: where descriptors are; stays the caller's to close.
            generation: which start of this segment it is, higher each time; None: counted
                in the metadata store.
            backends: paths by name, best first; or `Faults` around one. A name with a
                question mark ("rdma?") is left out where this machine can't.
            bind: address to listen at, IPv4 or IPv6; several for several network cards, which
                peers then use together.
            port: TCP port to listen at, the same at each address; 0 takes free ones.
            advertise: "host" or "host:port" that peers should dial, if not what is bound; as
                many as addresses are bound.
            host_id: who can pass file descriptors to each other; None: found out.
            topology: which network cards are near which memory, for peers that are reached
                over several; None: all are as near.
            settings: sizes, bounds and patience.

        Raises:
            ValueError: a bad name, backend or address.
            Rejected: a later generation of this segment is published already.
            Unavailable: this machine lacks what a backend needs (an OSError).
            OSError: nothing can listen there.
            MetadataError: the store can't.
        """
        check_name(name)
        directory = Directory(metadata)
        if generation is None:
            generation = directory.next_generation(name)
        settings = settings or TransferSettings()
        (bind, advertise), *more = _addresses(bind, advertise)
        home = Home(
            name=name,
            generation=generation,
            host_id=host_id or this_host(),
            bind=bind,
            port=port,
            advertise=advertise,
            more=tuple(more),
            topology=topology,
            regions=RegionTable(name, generation),
            inbox=Inbox(name, generation, settings.max_notifications),
            settings=settings,
        )
        return cls(home, backends, directory)

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The segment's name."""
        return self._home.name

    @property
    def generation(self) -> int:
        """Which start of this segment it is."""
        return self._home.generation

    # Memory.

    def allocate(self, n_bytes: int, location: str = "cpu:0") -> Memory:
        """Make zeroed memory that peers on this host can map, and register it.

        It lives until it is unregistered (or the engine closed) and all views are gone.

        Raises:
            ValueError: not at least one byte.
            OSError: the system has no more.
        """
        self._require_open()
        return self._regions.allocate(n_bytes, location)

    def register(self, buffer: "Buffer", location: str = "*") -> Region:
        """Let whoever has the region's key read and write this buffer until unregistered.

        Any contiguous buffer (bytearray, numpy array, mmap); a read-only one can only be
        read. Other processes reach it over a wire, not by mapping it: see `allocate`.

        Raises:
            ValueError: empty or not contiguous.
        """
        self._require_open()
        return self._regions.register(memoryview(buffer), location)

    def register_file(
        self,
        path: str | PathLike[str],
        *,
        offset: int = 0,
        length: int | None = None,
        writable: bool = True,
        location: str = "*",
        sync: bool = False,
        direct: bool = True,
    ) -> Region:
        """Let peers read and write a file or block device, or a range of it, like memory.

        They reach it over wires (this process does the I/O), and this process by transfers
        between its memory and this region. It has no views, and is not the local side of a
        transfer. A file that is removed stays readable until it is unregistered; one that
        gets shorter, or a device that fails, makes the transfer end in `Rejected`.

        Args:
            path: a regular file or block device, as long as it shall be.
            offset: of the region's first byte, in bytes.
            length: bytes; None: up to the end.
            writable: whether peers may write.
            location: where its device is, for a topology.
            sync: acknowledge writes only when the device says that they are durable.
            direct: go past the page cache where the file system allows.

        Raises:
            ValueError: no such range, or not a file or block device.
            OSError: it can't be opened.
        """
        self._require_open()
        file = RegionFile(
            path, offset=offset, length=length, writable=writable, sync=sync, direct=direct
        )
        return self._regions.register_file(file, location)

    def unregister(self, region: Region) -> None:
        """Take a region back. Peers' accesses are refused from now on.

        Returns when accesses over wires have ended. A peer that has the memory mapped is
        told, and may still finish the batch that it is copying.

        Raises:
            Rejected: it is not registered here.
        """
        entry = self._regions.remove(region.key)
        if entry is None:
            raise Rejected(f"not a region of segment {self.name} (any more)")
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        for backend in self._backends.values():
            backend.revoke(entry.region.key)
        if not self._regions.wait_quiet(entry, _POLITE_S):
            for backend in self._backends.values():
                backend.evict(entry.region.key)
            if not self._regions.wait_quiet(entry, _POLITE_S):
                _log.warning("a region of segment %s is still being accessed", self.name)
        self._regions.discard(entry)

    # Transfers.

    def submit(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float = 30.0,
        *,
        notify: bytes | None = None,
    ) -> Transfer:
        """Start moving these pieces; never waits for a peer.

        What is at most `copy_here_bytes` and can be copied in memory right away is copied
        before it returns: that is quicker than handing it to another thread.

        A read fills local regions from remote ones, a write the other way round. Pieces of
        one transfer may go to several peers, and in any order; two that overlap at the
        destination leave either's bytes there.

        The result raises `Rejected` for pieces out of bounds or local regions that are not
        ours; `submit` itself raises only for a wrong `op` or `notify`.

        Args:
            op: which way the bytes go.
            pieces: what to move.
            deadline_s: seconds from now to the end, at the latest.
            notify: a message that each peer of the pieces finds in its `notifications` after
                all bytes are applied: once if the result is good, at most once if it is not.

        Raises:
            ValueError: `op` is neither "read" nor "write", or `notify` is too long or for
                nobody.
        """
        if notify is None:
            report = self._copy_at_once(op, pieces, self._settings.copy_here_bytes)
            if report is not None:
                return Finished(report)
        return self._start(op, pieces, deadline_s, notify)

    def transfer(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float = 30.0,
        *,
        notify: bytes | None = None,
    ) -> Report:
        """Move these pieces and wait until they are there: `submit` and `result` in one.

        The calling thread carries the bytes itself where it can, which saves two changes of
        threads: for small transfers the larger part of the time.

        Raises:
            ValueError: `op` is neither "read" nor "write", or `notify` is too long or for
                nobody.
            TransferError: it failed.
        """
        if notify is None:
            report = self._copy_at_once(op, pieces, self._settings.batch_bytes)
            if report is not None:
                return report
        return self._start(op, pieces, deadline_s, notify, threading.get_ident()).result()

    def _copy_at_once(self, op: Op, pieces: Sequence[Piece], max_bytes: int) -> Report | None:
        """Go the short way (see `express`), if all of it goes well."""
        started = time.monotonic()
        if self._closed or not pieces or op not in ("read", "write"):
            return None
        remote = pieces[0].remote
        own = remote.segment == self.name and remote.generation == self.generation
        peer = (
            self._own_descriptor
            if own
            else self._directory.cached(remote.segment, remote.generation)
        )
        if peer is None:
            return None
        backend = self._own if own else next(self._reaching(peer), None)
        at_once = None if backend is None else self._at_once.get(backend.name)
        if backend is None or at_once is None:
            return None
        batch = one_batch(op, pieces, backend.name, max_bytes)
        if batch is None or not at_once(peer, batch) or self._check(op, pieces) is not None:
            return None
        if any(each is not APPLIED for each in self._move(batch, peer, backend, self._never)):
            return None
        n_bytes = sum(piece.length for piece in pieces)
        with self._lock:
            self._counts["done"] += 1
            self._counts[op] += n_bytes
        return Report(n_bytes, time.monotonic() - started, (backend.name,), 0)

    def _reaching(self, peer: SegmentDescriptor) -> Iterator[Backend]:
        return (backend for backend in self._backends.values() if backend.reaches(peer))

    def _start(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float,
        notify: bytes | None,
        carrier: int | None = None,
    ) -> LiveTransfer:
        if op not in ("read", "write"):
            raise ValueError(f"a transfer is a read or a write, not a {op!r}")
        notice = None if notify is None else self._notice(notify, pieces)
        plan = Plan(next(self._numbers), op, pieces, self._limits, notice)
        transfer = LiveTransfer(
            plan, deadline_s=deadline_s, perform=self._perform, on_cancel=self._on_cancel
        )
        error = self._admit(transfer) or self._check(op, pieces)
        if error is not None:
            transfer.stop(error)
            return transfer
        # With several peers it would keep the others waiting for the first.
        transfer.carrier = carrier if plan.n_peers == 1 else None
        self._deadlines.watch(transfer)
        transfer.begin()
        return transfer

    def _notice(self, message: bytes, pieces: Sequence[Piece]) -> Notice:
        if len(message) > MAX_NOTIFICATION_BYTES or not pieces:
            raise ValueError(
                f"a notification of {len(message)} bytes about {len(pieces)} pieces: at most "
                f"{MAX_NOTIFICATION_BYTES} bytes, and at least one piece to say for whom"
            )
        return Notice(secrets.token_bytes(KEY_BYTES), self.name, bytes(message))

    def _admit(self, transfer: LiveTransfer) -> TransferError | None:
        with self._lock:
            n_live = len(self._live)
            self._live.add(transfer)
            if self._closed:
                return Cancelled(f"the transfer engine of segment {self.name} is closed")
        if n_live >= self._settings.max_live:
            return Overloaded(f"{n_live} transfers are live, the limit; wait for some to end")
        return None

    def _check(self, op: Op, pieces: Sequence[Piece]) -> Rejected | None:
        """What is wrong with a request, as far as that can be seen from here."""
        # By identity: a scatter list names the same few regions again and again.
        fine: set[int] = set()
        views: dict[int, memoryview] = {}
        for piece in pieces:
            for side, region, offset in (
                ("local", piece.local, piece.local_offset),
                ("remote", piece.remote, piece.remote_offset),
            ):
                if id(region) not in fine:
                    if len(region.key) != KEY_BYTES or region.generation not in _GENERATIONS:
                        return Rejected(
                            f"the {side} region of a {op} can't be one: generation "
                            f"{region.generation}, a key of {len(region.key)} bytes"
                        )
                    if region.length > _MAX_REGION_BYTES:
                        return Rejected(f"the {side} region of a {op} has {region.length} bytes")
                    fine.add(id(region))
                if offset < 0 or piece.length < 0 or offset + piece.length > region.length:
                    return Rejected(
                        f"{op} of {piece.length} bytes at {side} offset {offset} of a region "
                        f"of segment {region.segment}, which has {region.length} bytes"
                    )
            view = views.get(id(piece.local))
            if view is None:
                try:
                    view = views[id(piece.local)] = self._regions.local(piece.local)
                except Refused as refused:
                    if refused.status is Status.NOT_SHAREABLE:
                        return Rejected(
                            f"the local region of a {op} is a file; a file is the remote side "
                            "of its owner's transfers, memory the local one"
                        )
                    return Rejected(
                        f"the local region of a {op} is of segment {piece.local.segment}, "
                        f"generation {piece.local.generation}, and not registered at segment "
                        f"{self.name}, generation {self.generation}: register it first"
                    )
            if piece.local_offset + piece.length > len(view):
                return Rejected(f"the local region of a {op} has {len(view)} bytes only")
            if op == "read" and view.readonly:
                return Rejected("the local region of a read is read-only memory")
        return None

    def _perform(self, transfer: LiveTransfer, command: Command) -> None:
        match command:
            case Resolve(peer=peer, fresh=fresh):
                paths = None if fresh and peer != self._own_key else self._known_paths(peer)
                if paths is not None:
                    transfer.on_resolved(peer, paths, moved=False)
                else:
                    self._couriers.post(
                        peer.segment, lambda: self._resolve(transfer, peer, fresh=fresh)
                    )
            case Carry(batch=batch):
                self._dispatch(transfer, batch)
            case Finish(error=error):
                self._finish(transfer, error)

    def _dispatch(self, transfer: LiveTransfer, batch: Batch) -> None:
        """Have a batch carried: by this thread, if that is worth it, or by a courier."""

        def job() -> None:
            self._carry(transfer, batch)

        here = transfer.carrier == threading.get_ident() and transfer.is_last_queued(batch)
        if here:
            # One only: what comes after it, tries of slices again, is posted.
            transfer.carrier = None
        if not (here and self._couriers.run_here(batch.peer.segment, job)):
            self._couriers.post(batch.peer.segment, job)

    def _resolve(self, transfer: LiveTransfer, peer: PeerKey, *, fresh: bool) -> None:
        try:
            found, moved = self._directory.resolve(peer.segment, peer.generation, fresh=fresh)
        except TransferError as error:
            transfer.on_unresolved(peer, error)
        else:
            transfer.on_resolved(peer, self._paths(found), moved=moved)

    def _known_paths(self, peer: PeerKey) -> tuple[Path, ...] | None:
        if peer == self._own_key:
            return (Path(self._own.name, self._own.slice_bytes),)
        known = self._directory.cached(peer.segment, peer.generation)
        return None if known is None else self._paths(known)

    def _paths(self, peer: SegmentDescriptor) -> tuple[Path, ...]:
        return tuple(
            Path(backend.name, backend.slice_bytes, max(1, len(peer.rails(backend.name))))
            for backend in self._reaching(peer)
        )

    def _carry(self, transfer: LiveTransfer, batch: Batch) -> None:
        if not transfer.take(batch.number):
            return
        own = batch.peer == self._own_key
        backend = self._own if own else self._backends[batch.path]
        try:
            peer = self._own_descriptor if own else self._peer(batch.peer)
        except TransferError as error:
            outcomes: Sequence[Outcome] = all_of(batch, Fate.LOST, str(error))
        else:
            outcomes = self._move(batch, peer, backend, transfer.stop_signal)
        transfer.on_carried(batch.number, outcomes)

    def _move(
        self, batch: Batch, peer: SegmentDescriptor, backend: Backend, stop: StopSignal
    ) -> Sequence[Outcome]:
        try:
            if batch.notice is not None:
                return [backend.notify(Errand(batch, peer, (), stop))]
            regions = {each.local.key: each.local for each in batch.slices}.values()
            with self._regions.lease_local(regions) as views:
                local = tuple(
                    views[each.local.key][each.local_offset : each.local_offset + each.length]
                    for each in batch.slices
                )
                return backend.carry(Errand(batch, peer, local, stop))
        except Refused:
            return all_of(batch, Fate.REJECTED, "the local region was unregistered meanwhile")
        except Exception as error:
            # A fault in a backend must not leave its transfer hanging.
            _log.exception("backend %s failed", batch.path)
            return all_of(batch, Fate.UNUSABLE, f"the backend failed: {error!r}")

    def _peer(self, peer: PeerKey) -> SegmentDescriptor:
        return self._directory.resolve(peer.segment, peer.generation, fresh=False)[0]

    def _finish(self, transfer: LiveTransfer, error: TransferError | None) -> None:
        plan = transfer.plan
        self._deadlines.forget(transfer)
        with self._lock:
            self._live.discard(transfer)
            self._counts["retries"] += plan.n_retries
            if error is None:
                self._counts["done"] += 1
                self._counts[plan.op] += plan.n_bytes
            else:
                self._counts["failed"] += 1
            if not self._live:
                self._all_done.notify_all()
        transfer.finish(error)

    def _on_cancel(self, transfer: LiveTransfer) -> None:
        transfer.stop(Cancelled(f"{transfer.plan.op} of {transfer.plan.n_bytes} bytes, cancelled"))

    def _on_overdue(self, transfer: LiveTransfer) -> None:
        transfer.stop(transfer.timeout_error())

    # Notifications.

    def notifications(self, timeout_s: float | None = 0.0) -> Notification | None:
        """Take the oldest message that a peer's transfer left here, each once.

        Args:
            timeout_s: seconds to wait for one, from a thread; None waits for ever.

        Returns:
            None when none came in time.

        Raises:
            TransferError: the engine is closed.
        """
        return self._home.inbox.take(timeout_s)

    async def next_notification(self, timeout_s: float | None = None) -> Notification | None:
        """Like `notifications`, from asyncio; a cancelled waiter loses no message.

        Raises:
            TransferError: the engine is closed.
        """
        return await self._home.inbox.wait(timeout_s)

    # Peers.

    def view(self, region: Region, offset: int, length: int) -> memoryview | None:
        """These bytes of a region, read-only and without a copy, if that is possible.

        It is for our own regions, and for those of a peer on this host that allocated them;
        None otherwise. The first view of a region asks its owner for it (and perhaps the
        metadata store for the owner), so it may block shortly. The view stays readable when
        the owner goes away, and shows whatever the owner writes meanwhile.

        Raises:
            Rejected: out of bounds, unknown key, or another generation.
        """
        self._require_open()
        key = PeerKey(region.segment, region.generation)
        try:
            if key == self._own_key:
                whole = self._regions.view(region.generation, region.key)
            else:
                peer = self._peer(key)
                found = (backend.view(peer, region.key) for backend in self._reaching(peer))
                first = next((view for view in found if view is not None), None)
                if first is None:
                    return None
                whole = first
        except Lost:
            return None
        except Refused as refused:
            if refused.status is Status.NOT_SHAREABLE:
                return None
            raise Rejected(f"view of a region of segment {region.segment}: {refused}") from None
        if offset < 0 or length < 0 or offset + length > len(whole):
            raise Rejected(
                f"view of {length} bytes at offset {offset} of a region of segment "
                f"{region.segment}, which has {len(whole)} bytes"
            )
        return whole[offset : offset + length]

    def introduce(self, peer: SegmentDescriptor) -> None:
        """Know a peer that keeps no record in our metadata store, until it is released.

        Backends that speak other systems' protocols call this when they have found one.
        """
        self._require_open()
        self._directory.introduce(peer)

    def backend(self, name: str) -> Backend:
        """One of the backends that this engine was opened with, for what only it can do.

        Raises:
            ValueError: it was opened without.
        """
        if name not in self._backends:
            has = ", ".join(self._backends)
            raise ValueError(f"segment {self.name} has no backend {name!r}; it has {has}")
        return self._backends[name]

    def release_peer(self, segment: str) -> None:
        """Forget a peer that is gone: its descriptor, connections and mapped memory."""
        self._directory.forget(segment)
        for backend in self._backends.values():
            backend.forget(segment)

    def stats(self) -> TransferStats:
        """Counters since `open`, and gauges of now."""
        gauges = [backend.gauges() for backend in self._backends.values()]
        with self._lock:
            return TransferStats(
                n_transfers=self._counts["done"],
                bytes_read=self._counts["read"],
                bytes_written=self._counts["write"],
                n_failures=self._counts["failed"],
                n_retries=self._counts["retries"],
                n_live=len(self._live),
                n_regions=len(self._regions),
                n_connections=sum(each.n_connections for each in gauges),
                n_mappings=sum(each.n_mappings for each in gauges),
                n_malformed=sum(each.n_malformed for each in gauges),
            )

    # The end.

    def close(self) -> None:
        """Withdraw the segment, end live transfers with `Cancelled`, free everything.

        Memory from `allocate` stays until its last view is dropped; the regions are gone.
        A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        self._lease.close()
        self._directory.withdraw(self.descriptor)
        for transfer in live:
            transfer.stop(Cancelled(f"the transfer engine of segment {self.name} was closed"))
        with self._all_done:
            self._all_done.wait_for(lambda: not self._live)
        self._couriers.close()
        self._home.inbox.close()
        self._deadlines.close()
        entries = self._regions.clear()
        for backend in reversed(self._backends.values()):
            backend.close()
        self._own.close()
        for entry in entries:
            # Copies that were made at once are not among the live transfers.
            self._regions.wait_quiet(entry, _POLITE_S)
            self._regions.discard(entry)

    def _publish(self) -> None:
        self._directory.publish(self.descriptor, self._settings.lease_s)

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError(f"the transfer engine of segment {self.name} is closed")

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._regions.check()
        self._couriers.check()
        self._home.inbox.check()
        with self._lock:
            assert not any(transfer.done() for transfer in self._live), "done and still live"


def _addresses(
    bind: str | Sequence[str], advertise: str | Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """Each address to listen at, with what to advertise for it."""
    binds = [bind] if isinstance(bind, str) else list(bind)
    told: Sequence[str | None] = [advertise] if isinstance(advertise, str) else advertise or ()
    if not binds or len(told) not in (0, len(binds)):
        raise ValueError(
            f"{len(binds)} addresses to listen at and {len(told)} to advertise: at least one, "
            "and as many of these as of those"
        )
    return list(zip(binds, told or [None] * len(binds), strict=True))


def _required(choice: "str | Faults") -> "str | Faults":
    """Without the mark that it may be left out."""
    return choice.removesuffix("?") if isinstance(choice, str) else choice


def this_host() -> str:
    """What processes that can pass each other file descriptors have in common.

    The kernel's boot and the network namespace: abstract Unix sockets live in the latter.
    """
    boot = FilePath("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{FilePath('/proc/self/ns/net').stat().st_ino}"
