"""Copy by a device between its memory and that of another process on the same host.

A region's handle is requested by its key once (`cuda_wire`), opened and kept (`opened_regions`).
The other side of a copy is memory of this process, on a device or not. On this path, regions are
unusable that are not device memory, or of a kind that its driver does not export. The next path is
taken for them.

No wire is crossed, so there are no checksums. A copy is applied when the device reports its end.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
    refusal_outcome,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.cuda.cuda_peer import CudaPeer
from halfmoon_transfer.backends.cuda.cuda_server import CudaServer
from halfmoon_transfer.backends.cuda.opened_regions import OpenedRegion, OpenedRegionTable
from halfmoon_transfer.backends.unix_peer import UnixPeerGone
from halfmoon_transfer.backends.unix_peer_table import UnixPeerTable, refuse_revoked
from halfmoon_transfer.devices.device_interface import CopyEvent, DeviceError
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, access_refusal


class CudaBackend:
    """Both sides of handles."""

    name = "cuda"
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=False,
        notifications=False,
        views=False,
        checks_accesses=False,
    )

    def __init__(self, context: EngineContext) -> None:
        self.slice_bytes = context.settings.copy_slice_bytes
        self._host_id = context.host_id
        self._devices = context.devices
        self._server = CudaServer(
            context.regions,
            label=f"halfmoon-transfer-{context.name}-cuda",
            max_connections=context.settings.max_connections,
        )
        self._opened = OpenedRegionTable(context.settings.max_mappings)
        self._peers = UnixPeerTable[CudaPeer](self.name, CudaPeer, self._opened)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The name of our Unix socket."""
        return {self.name: Endpoint(self._server.address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer is on this host and hands out handles."""
        return peer.host_id == self._host_id and self.name in peer.endpoints

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Copy between host memory of ours and device memory of the peer."""
        return self._carry(
            request, [LocalRegion(view) for view in request.local], [0] * len(request.local)
        )

    def carry_direct(
        self, request: CarryRequest, locals_: dict[bytes, LocalRegion]
    ) -> Sequence[SliceOutcome]:
        """Copy like `carry`, where some of our memory is on devices, too."""
        slices = request.batch.slices
        return self._carry(
            request,
            [locals_[each.local.key] for each in slices],
            [each.local_offset for each in slices],
        )

    def _carry(
        self, request: CarryRequest, locals_: Sequence[LocalRegion], offsets: Sequence[int]
    ) -> Sequence[SliceOutcome]:
        """Begin all copies, wait for all, and check before and after that the owner is alive."""
        batch = request.batch
        revoked = self._peers.begin_batch()
        try:
            peer = self._peers.get(request.peer)
            with ExitStack() as in_use:
                found = {
                    key: self._acquire(in_use, peer, request, key, revoked)
                    for key in {each.remote.key for each in batch.slices}
                }
                begun: list[CopyEvent | SliceOutcome] = []
                try:
                    for index, each in enumerate(batch.slices):
                        opened = found[each.remote.key]
                        begun.append(_begin(request, index, opened, locals_[index], offsets[index]))
                finally:
                    # Also after an error, no copy touches the memory afterwards.
                    outcomes = [
                        each if isinstance(each, SliceOutcome) else _end(request, index, each)
                        for index, each in enumerate(begun)
                    ]
            peer.require_alive()
        except UnixPeerGone as gone:
            self._peers.drop(request.peer)
            return same_outcome_for_all(batch, gone.kind, str(gone))
        finally:
            self._peers.end_batch(revoked)
        return refuse_revoked(batch, outcomes, revoked) if revoked else outcomes

    def _acquire(
        self,
        in_use: ExitStack,
        peer: CudaPeer,
        request: CarryRequest,
        key: bytes,
        revoked: set[bytes],
    ) -> OpenedRegion | AccessRefused:
        """Return a peer's region, opened until `in_use` ends, or why it can't be."""

        def make() -> OpenedRegion:
            granted = peer.request_region(request.batch.peer.generation, key, request.stop)
            device = self._devices.find(granted.device)
            if device is None:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            return OpenedRegion(granted, device)

        try:
            opened = self._opened.acquire((peer.address, key), make)
        except AccessRefused as refused:
            return refused
        in_use.callback(self._opened.release, opened)
        if key in revoked:
            # Another thread may have read that between the answer and now.
            self._opened.drop((peer.address, key))
        return opened

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Refuse: this path carries no notifications, and the next one does."""
        return SliceOutcome(
            OutcomeKind.UNUSABLE, "cuda carries no notifications; enable shm or tcp as well"
        )

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return None: host code can't read device memory."""
        return None

    def revoke(self, key: bytes) -> None:
        """Tell peers that opened the region."""
        self._server.revoke(key)

    def evict(self, key: bytes) -> None:
        """Do nothing: opened memory can't be taken away."""

    def forget(self, segment: str) -> None:
        """Hang up on a peer and close its memory."""
        self._peers.forget(segment)

    def gauges(self) -> BackendGauges:
        """Return the connections of both sides, and the opened regions."""
        return BackendGauges(
            n_connections=self._server.n_connections + len(self._peers),
            n_mappings=len(self._opened),
            n_malformed=self._server.n_malformed,
        )

    def close(self) -> None:
        """Hang up on all peers and close their memory."""
        self._peers.close()
        self._server.close()


def _begin(
    request: CarryRequest,
    index: int,
    found: OpenedRegion | AccessRefused,
    local: LocalRegion,
    offset: int,
) -> CopyEvent | SliceOutcome:
    """Begin one slice's copy, or return why not."""
    batch, each = request.batch, request.batch.slices[index]
    if request.stop.stopped:
        return SliceOutcome(OutcomeKind.LOST, "stopped")
    if isinstance(found, AccessRefused):
        return refusal_outcome(batch, each, found.status, found.detail)
    refused = access_refusal(
        each.remote_offset,
        each.length,
        write=batch.op == "write",
        n_bytes=found.length,
        writable=found.writable,
    )
    if refused is not None:
        return refusal_outcome(batch, each, refused.status, refused.detail)
    if index in request.damage:
        # Bytes can't be damaged on this path: a slice that shall be damaged never lands.
        return refusal_outcome(batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)
    try:
        return _begin_copy(batch.op == "write", each, found, local, offset)
    except DeviceError as error:
        return refusal_outcome(batch, each, AccessStatus.DEVICE_FAILED, error.code)


def _begin_copy(
    write: bool, each: Slice, found: OpenedRegion, local: LocalRegion, offset: int
) -> CopyEvent | SliceOutcome:
    there = found.address + each.remote_offset
    if local.device is None:
        view = local.view[offset : offset + each.length]
        return found.device.copy_in(view, there) if write else found.device.copy_out(there, view)
    if type(local.device.device) is not type(found.device):
        return SliceOutcome(
            OutcomeKind.UNUSABLE, f"no copy between {local.device.device.location} and that"
        )
    here = local.device.address + offset
    source, destination = (here, there) if write else (there, here)
    return found.device.copy_within(source, destination, each.length)


def _end(request: CarryRequest, index: int, event: CopyEvent) -> SliceOutcome:
    try:
        event.wait()
    except DeviceError as error:
        each = request.batch.slices[index]
        return refusal_outcome(request.batch, each, AccessStatus.DEVICE_FAILED, error.code)
    return APPLIED
