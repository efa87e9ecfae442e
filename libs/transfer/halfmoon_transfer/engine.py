"""Move bytes between registered regions: the engine that services open.

    submit, transfer -> FastPath         a small transfer, in the caller's thread
                     -> TransferManager  all others: plans, and the threads that carry for them
    both             -> PathRouter       backends, to peers and to our own regions

The engine has threads and no event loop: sockets and copies release the interpreter lock, and an
asyncio caller is woken once per transfer.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import TYPE_CHECKING

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import Backend, EngineContext, SupportsHangUp
from halfmoon_transfer.devices.device_spans import device_span, host_view
from halfmoon_transfer.engine_setup import make_context, make_descriptor, open_backends
from halfmoon_transfer.interface import (
    Notification,
    Op,
    Overloaded,
    Piece,
    Rejected,
    Report,
    Transfer,
    TransferError,
)
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor, check_segment_name
from halfmoon_transfer.metadata.segment_directory import SegmentDirectory
from halfmoon_transfer.planning.topology import Topology
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.file_region import FileRegion
from halfmoon_transfer.regions.grant_revocation import GrantRevocation
from halfmoon_transfer.regions.region_grant import GrantedOps
from halfmoon_transfer.regions.region_table import Memory
from halfmoon_transfer.regions.shared_memory import SharedMemory
from halfmoon_transfer.settings import TransferSettings
from halfmoon_transfer.threads.stop_signal import StopSignal
from halfmoon_transfer.transfers.engine_threads import EngineThreads
from halfmoon_transfer.transfers.fast_path import FastPath, FinishedTransfer
from halfmoon_transfer.transfers.live_transfer import LiveTransfer
from halfmoon_transfer.transfers.path_router import PathRouter
from halfmoon_transfer.transfers.request_checks import make_notification
from halfmoon_transfer.transfers.transfer_manager import TransferManager
from halfmoon_transfer.transfers.transfer_stats import TransferCounters, TransferStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from halfmoon_transfer.backends.fault_injection import FaultInjection
    from halfmoon_transfer.devices.device_spans import CudaArrayLike, DeviceSpan, TensorLike
    from halfmoon_transfer.devices.device_view import DeviceBackedMemory

_log = logging.getLogger(__name__)


class TransferEngine:
    """One process's segment: its regions, its paths to peers, its live transfers.

    All methods are safe from any thread. `open` and `close` block; so may `view` and
    `unregister`; `submit` never waits for a peer.
    """

    def __init__(
        self,
        context: EngineContext,
        directory: SegmentDirectory,
        backends: Mapping[str, Backend],
        descriptor: SegmentDescriptor,
        threads: EngineThreads,
    ) -> None:
        """Use `open`."""
        self._now = threads.now
        self._context = context
        self._regions = context.regions
        self._settings = context.settings
        self._directory = directory
        #: The published description of this segment.
        self.descriptor = descriptor
        self._counters = TransferCounters()
        self._router = PathRouter(context, directory, backends, descriptor)
        self._fast_path = FastPath(context, self._router, self._counters, threads.now)
        self._transfers = TransferManager(context, self._router, self._counters, threads)
        self._closed = False
        self._lease = threads.renew(
            f"halfmoon-transfer-{context.name}-lease",
            self._publish,
            self._withdraw,
            context.settings.lease_s,
        )

    @classmethod
    def open(
        cls,
        name: str,
        *,
        metadata: MetadataStore | None = None,
        generation: int | None = None,
        backends: Sequence["str | FaultInjection"] = ("shm", "tcp"),
        bind: str | Sequence[str] = "127.0.0.1",
        port: int = 0,
        advertise: str | Sequence[str] | None = None,
        host_id: str | None = None,
        topology: Topology | None = None,
        settings: TransferSettings | None = None,
        threads: EngineThreads | None = None,
    ) -> "TransferEngine":
        """Open a segment and publish its descriptor.

        Args:
            name: the segment's name, unique in the metadata store.
            metadata: the store of descriptors, which the caller closes; None: there is none, and
                peers are made known by `add_peer`.
            generation: the number of this start of the segment, higher each time; None: counted
                in the metadata store.
            backends: paths by name, best first; or `FaultInjection` around one. A name with a
                question mark ("rdma?") is left out where this machine lacks it.
            bind: address to listen at, IPv4 or IPv6; several for several network cards, which
                peers then use together.
            port: TCP port to listen at, the same at each address; 0 takes free ones.
            advertise: "host" or "host:port" that peers should dial, if not what is bound; as
                many as addresses are bound.
            host_id: the same in processes that can pass file descriptors; None: detected.
            topology: which NICs are near which memory, for peers that are reached over
                several; None: all are equally near.
            settings: sizes, bounds and timeouts.
            threads: what runs jobs and tells the time; None: threads and the machine's clock.

        Raises:
            ValueError: a bad name, backend or address.
            Rejected: a later generation of this segment is published already.
            BackendUnavailable: a library, driver or device of a backend is missing here.
            OSError: an address can't be listened at.
            MetadataError: the store failed.
        """
        check_segment_name(name)
        threads = threads or EngineThreads()
        directory = SegmentDirectory(MemoryStore() if metadata is None else metadata)
        if generation is None:
            generation = directory.next_generation(name)
        context = make_context(
            name,
            generation,
            bind=bind,
            port=port,
            advertise=advertise,
            host_id=host_id,
            topology=topology,
            settings=settings or TransferSettings(),
            now=threads.now,
        )
        with ExitStack() as undo:
            opened = open_backends(backends, context, undo)
            descriptor = make_descriptor(context, opened.values())
            directory.publish(descriptor, context.settings.lease_s)
            undo.pop_all()
        return cls(context, directory, opened, descriptor, threads)

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The segment's name."""
        return self._context.name

    @property
    def generation(self) -> int:
        """The number of this start of the segment."""
        return self._context.generation

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

    def register_shared(self, shared: SharedMemory, location: str = "cpu:0") -> Memory:
        """Register memory that outlives this engine, as `allocate` does with memory of its own.

        Its region has a new key: what an earlier engine's region allowed is allowed no more.

        Raises:
            OSError: the system has no more descriptors.
        """
        self._require_open()
        return self._regions.register_shared(shared, location)

    def register(
        self, buffer: "Buffer | TensorLike | CudaArrayLike | DeviceSpan", location: str = "*"
    ) -> Region:
        """Let peers with the region's key read and write this buffer until it is unregistered.

        Any contiguous buffer (bytearray, numpy array, mmap) or torch tensor; a read-only one can
        only be read. Other processes can't map it (see `allocate`): the kernel copies for them
        where it is allowed, and else the bytes go over a wire.

        The buffer may be memory of a device: a CUDA tensor, an array with
        `__cuda_array_interface__`, or a `DeviceSpan`. Its location is then the device ("cuda:0").
        Kernels that write the memory must have ended before a transfer that sends it is submitted.

        Raises:
            ValueError: empty or not contiguous, or on a device of another kind.
            TypeError: not a buffer.
            BackendUnavailable: it is on a device whose driver or binding is missing.
            DeviceError: the driver refuses.
        """
        self._require_open()
        span = device_span(buffer)
        if span is not None:
            return self._context.devices.register(span, location)
        return self._regions.register(host_view(buffer), location)

    def register_device(
        self, buffer: "TensorLike | CudaArrayLike | DeviceSpan"
    ) -> "DeviceBackedMemory":
        """Register memory of a device as `register` does, with a view that copies from it.

        Raises:
            ValueError: it is memory of the host.
            BackendUnavailable: the device's driver or binding is missing.
            DeviceError: the driver refuses.
        """
        from halfmoon_transfer.devices.device_view import DeviceBackedMemory, DeviceView

        self._require_open()
        span = device_span(buffer)
        if span is None:
            raise ValueError("this memory is the host's: use `register`")
        devices = self._context.devices
        region = devices.register(span, "*")
        device = devices.device(devices.locate(span))
        return DeviceBackedMemory(region, DeviceView(device, span.address, span.length, span))

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

        Peers reach it over wires, and this process does the I/O. This process reaches it by
        transfers between its memory and this region. It has no views, and is not the local side of
        a transfer. A removed file stays readable until it is unregistered. If a file is truncated
        or a device fails, the transfer ends in `Rejected`.

        Args:
            path: a regular file or block device, of its final length.
            offset: of the region's first byte, in bytes.
            length: bytes; None: up to the end.
            writable: whether peers may write.
            location: of its device, for a topology.
            sync: acknowledge writes only when the device reports them as durable.
            direct: bypass the page cache where the file system allows.

        Raises:
            ValueError: no such range, or not a file or block device.
            OSError: it can't be opened.
        """
        self._require_open()
        file = FileRegion(
            path, offset=offset, length=length, writable=writable, sync=sync, direct=direct
        )
        return self._regions.register_backed(file, location)

    def unregister(self, region: Region) -> None:
        """Remove a region and its grants. Peers' accesses are refused from now on.

        Returns when accesses over wires have ended. A peer that has mapped the memory is told, and
        may still finish the batch that it is copying.

        Raises:
            Rejected: it is not registered here.
        """
        entry = self._regions.remove(region.key)
        if entry is None:
            raise Rejected(f"not a region of segment {self.name} (any more)")
        for grant in self._regions.index.remove_grants_of(entry):
            self._router.end_accesses(grant)
        self._router.revoke_region(entry)

    # Grants.

    def grant(
        self, region: Region, ranges: Iterable[tuple[int, int]], op: GrantedOps, ttl_s: float
    ) -> Region:
        """Make a key that allows less than the region's: some ranges, some operations, for a time.

        A peer uses the result in place of the region, with the same offsets. Memory mapped by
        other processes, RDMA and views have no check of each access, so a grant has no use there:
        its bytes go over another path, TCP for instance. Only memory of the host can be granted.

        An access that began before the end of `ttl_s` may finish after it. Call `revoke` before
        the memory is used for something else, and in any case at the end: it frees the grant.

        Args:
            region: one of ours.
            ranges: offset and length of each.
            op: what a peer may do with them, "read", "write" or "both".
            ttl_s: seconds until the key is refused.

        Raises:
            ValueError: no range, or one that is empty or not within the region.
            Rejected: the region is not registered here, or is not in memory of the host.
            Overloaded: there are too many grants.
        """
        self._require_open()
        try:
            return self._regions.grant(region, ranges, op, ttl_s)
        except AccessRefused as refused:
            if refused.status is AccessStatus.NO_ROOM:
                raise Overloaded(
                    f"segment {self.name} has {refused.detail} grants, the limit; revoke some"
                ) from None
            raise Rejected(
                f"can't grant of a region of segment {self.name}: {refused}; it must be "
                "registered here, and be memory of the host"
            ) from None

    def extend_grant(self, granted: Region, ttl_s: float) -> None:
        """Let a grant end so many seconds from now, sooner or later than it would have.

        Raises:
            Rejected: it is not a grant of ours (any more).
        """
        if not self._regions.extend_grant(granted, ttl_s):
            raise Rejected(f"not a grant of segment {self.name} (any more)")

    def revoke(self, granted: Region, *, patience_s: float = 1.0) -> bool:
        """Take a grant back; return when no peer accesses the bytes by it any more.

        It waits where an access goes on, so an event loop calls `begin_revoke`.

        Args:
            granted: one of ours.
            patience_s: seconds until the connections of accesses that go on are cut.

        Returns:
            False if an access has not ended though its connection was cut a second ago.

        Raises:
            Rejected: it is not a grant of ours (any more).
        """
        return self.begin_revoke(granted).finish(patience_s)

    def begin_revoke(self, granted: Region) -> GrantRevocation:
        """Take a grant back at once: no access by it begins any more.

        Returns:
            Tells when the accesses that had begun have ended.

        Raises:
            Rejected: it is not a grant of ours (any more).
        """
        entry = self._regions.index.remove_grant(granted.key)
        if entry is None:
            raise Rejected(f"not a grant of segment {self.name} (any more)")
        return GrantRevocation(
            lambda: self._regions.leases.is_idle(entry),
            lambda patience_s: self._router.end_accesses(entry, patience_s),
        )

    def cut_connections(self) -> None:
        """Cut the connections by which peers reach our regions.

        A moment later nothing lands any more that was sent over them, whether it is half received
        or still in the network. The peers write again over other connections, unless they gave up.
        A peer that is in the middle of a copy in shared memory ends it first, see `is_quiet`. RDMA
        and memory of devices can't be cut.
        """
        for backend in self._router.backends.values():
            if isinstance(backend, SupportsHangUp):
                backend.hang_up()

    def is_quiet(self) -> bool:
        """Return whether no access goes on over a connection that was cut.

        A peer that was stopped in the middle of a copy goes on with it later, so this may stay
        false until it has. Ask a moment after the cut, and before the memory is used for something
        else. Peers of shared memory that show no write mark are not waited for.
        """
        return all(
            backend.is_quiet()
            for backend in self._router.backends.values()
            if isinstance(backend, SupportsHangUp)
        )

    def can_grant(self, region: Region) -> bool:
        """Return whether a grant of this region holds on one of our paths: one that is checked."""
        checked = (each.capabilities.checks_accesses for each in self._router.backends.values())
        return any(checked) and self._regions.is_in_memory(region)

    @property
    def unchecked_paths(self) -> frozenset[str]:
        """Names of the paths whose owner does not check each access: they carry no grants."""
        paths = self._router.backends.values()
        return frozenset(each.name for each in paths if not each.capabilities.checks_accesses)

    # Transfers.

    def submit(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float = 30.0,
        *,
        notify: bytes | None = None,
        checksums: bool = True,
        verify: bool = False,
    ) -> Transfer:
        """Start moving these pieces; never waits for a peer.

        A transfer of at most `copy_here_bytes` that is a copy in memory is done before this
        returns: that is quicker than passing it to another thread.

        A read fills local regions from remote ones, a write the other way round. Pieces of one
        transfer may go to several peers, and in any order. If two overlap at the destination, the
        bytes of either remain there.

        The result raises `Rejected` for pieces out of bounds and for local regions that are not
        registered here. `submit` itself raises only for a wrong `op` or `notify`.

        Args:
            op: the direction of the bytes.
            pieces: what to move.
            deadline_s: seconds from now to the end, at the latest.
            notify: a message that each peer of the pieces finds in its `notifications` after
                all bytes are applied: once after a success, at most once after a failure.
            checksums: whether bytes that cross a wire carry checksums of their own. False spares
                both sides the work when the caller verifies the bytes in its own memory anyway,
                by checksums of before the transfer; damaged bytes are then not sent again.
            verify: whether bytes are compared at their destination though no wire is crossed, as
                in shared memory. Other bytes than were sent are copied again. If they never match,
                the result raises `Corrupted`. RDMA and memory of devices compare nothing.

        Raises:
            ValueError: `op` is neither "read" nor "write", or `notify` is too long or has
                no receiver.
        """
        if notify is None and not self._closed:
            report = self._fast_path.copy(op, pieces, self._settings.copy_here_bytes, verify=verify)
            if report is not None:
                return FinishedTransfer(report)
        return self._start(op, pieces, deadline_s, notify, checksums=checksums, verify=verify)

    def allow_writes_while(self, may_write: Callable[[], bool]) -> None:
        """Begin no write while this returns false; those that wait begin when it is true again.

        A process that stood still, as by SIGSTOP, may write to memory that is another request's by
        now. It says false here until it knows. A write that is being copied in this moment goes on.

        Args:
            may_write: called from any thread, for each write; quick.
        """
        self._fast_path.may_write = self._transfers.may_write = may_write

    def transfer(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float = 30.0,
        *,
        notify: bytes | None = None,
        verify: bool = False,
    ) -> Report:
        """Move these pieces and wait until they are there: `submit` and `result` in one.

        The calling thread carries the bytes itself where it can, which saves two changes of
        threads: for small transfers the larger part of the time. A transfer of at most
        `express_bytes` also needs no plan, if a TCP connection to the peer is idle.

        Raises:
            ValueError: `op` is neither "read" nor "write", or `notify` is too long or has
                no receiver.
            TransferError: it failed.
        """
        if notify is None and not self._closed:
            started = self._now()
            report = self._fast_path.move(op, pieces, deadline_s, verify=verify)
            if report is not None:
                return report
            deadline_s = round(deadline_s - (self._now() - started), 3)
        carrier = threading.get_ident()
        return self._start(op, pieces, deadline_s, notify, carrier, verify=verify).result()

    def _start(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float,
        notify: bytes | None,
        carrier: int | None = None,
        *,
        checksums: bool = True,
        verify: bool = False,
    ) -> LiveTransfer:
        if op not in ("read", "write"):
            raise ValueError(f"a transfer is a read or a write, not a {op!r}")
        notification = None if notify is None else make_notification(pieces, notify, self.name)
        return self._transfers.start(
            op, pieces, deadline_s, notification, carrier, checksums=checksums, verify=verify
        )

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
        return self._context.notification_queue.take(timeout_s)

    async def next_notification(self, timeout_s: float | None = None) -> Notification | None:
        """Like `notifications`, from asyncio; a cancelled waiter loses no message.

        Raises:
            TransferError: the engine is closed.
        """
        return await self._context.notification_queue.wait(timeout_s)

    # Peers.

    def view(self, region: Region, offset: int, length: int) -> memoryview | None:
        """Return these bytes of a region, read-only and without a copy; None if it can't.

        It works for our own regions, and for regions that a peer on this host allocated. The first
        view of a region asks its owner (and perhaps the metadata store for the owner), so it may
        block shortly. The view stays readable when the owner goes away, and shows later writes of
        the owner.

        Raises:
            Rejected: out of bounds, unknown key, or another generation.
        """
        self._require_open()
        return self._router.view(region, offset, length)

    def resolve_peer(self, segment: str, generation: int) -> None:
        """Look a peer up before the first transfer to it; return at once if it is known.

        May block on the metadata store. A peer that is known stays known if the store fails.

        Raises:
            Rejected: the segment is of another generation.
            Lost: there is no such segment, or the store does not answer.
        """
        self._require_open()
        self._router.resolve_peer(segment, generation)

    def knows_peer(self, segment: str, generation: int) -> bool:
        """Return whether a transfer to this start of a segment needs no look at the store."""
        return self._router.knows_peer(segment, generation)

    def is_unsettled(self, region: Region) -> bool:
        """Return whether bytes of writes that were given up may still land in a peer's memory.

        That is so after a write over TCP that was cancelled, overdue or broken off: its bytes may
        be on their way still. Before its owner gives the memory to other data, `settle` it.
        """
        return self._router.is_unsettled(region.segment, region.generation)

    def settle(self, region: Region, timeout_s: float) -> None:
        """Return when no byte of a write that was given up before can land at a region's owner.

        Blocks for a round trip to the owner, if there was such a write.

        Raises:
            Lost: the owner does not confirm it within `timeout_s` seconds.
        """
        self._require_open()
        stop = StopSignal(self._now() + timeout_s, self._now)
        self._router.settle(region.segment, region.generation, stop)

    def add_peer(self, peer: SegmentDescriptor) -> None:
        """Make a peer known that keeps no record in our metadata store, until it is released.

        `Mooncake.open` calls this for a foreign segment.
        """
        self._require_open()
        self._directory.introduce(peer)

    def backend(self, name: str) -> Backend:
        """Return one of the backends of this engine, for functions of its own.

        Raises:
            ValueError: the engine was opened without it.
        """
        backends = self._router.backends
        if name not in backends:
            has = ", ".join(backends)
            raise ValueError(f"segment {self.name} has no backend {name!r}; it has {has}")
        return backends[name]

    def release_peer(self, segment: str) -> None:
        """Forget a peer that is gone: its descriptor, connections and mapped memory."""
        self._router.forget(segment)

    def stats(self) -> TransferStats:
        """Return the counters since `open`, and the current gauges."""
        return self._counters.stats(
            self._router.gauges(), n_live=len(self._transfers), n_regions=len(self._regions)
        )

    # The end.

    def close(self) -> None:
        """Withdraw the segment, end live transfers with `Cancelled`, free everything.

        Memory from `allocate` stays until its last view is dropped; the regions are gone.
        A second call does nothing.
        """
        if not self._transfers.stop_admitting():
            return
        self._closed = True
        self._lease.close()
        self._transfers.close()
        self._context.notification_queue.close()
        self._router.close()
        self._context.devices.close()

    def restore_record(self) -> None:
        """Publish the segment's record now, not at its next renewal.

        For an owner that has found that the metadata server lost its data.

        Raises:
            MetadataError: the store fails.
        """
        if self._closed:
            return
        try:
            self._publish()
        except TransferError as error:
            _log.warning("the record of segment %s is not restored: %s", self.name, error)

    def _publish(self) -> None:
        self._directory.publish(self.descriptor, self._settings.lease_s)

    def _withdraw(self) -> None:
        self._directory.withdraw(self.descriptor)

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError(f"the transfer engine of segment {self.name} is closed")

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._regions.check()
        self._transfers.check()
        self._context.notification_queue.check()
