"""Copies by a device between its memory and that of another process on the same host.

A region's handle is asked for by its key once (`wire`), opened and kept (`opened`). The other side
of a copy is memory of this process, on a device or not. Regions that are not device memory, or of a
kind that its driver does not export, are unusable on this path: the next one is taken. No wire is
crossed, so there are no checksums; a copy is applied when the device says that it has ended.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from halfmoon_transfer.backends.backend_interface import (
    BackendGauges,
    CarryRequest,
    EngineContext,
    refusal_outcome,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.cuda.cuda_peer import CudaPeer, CudaPeerGone
from halfmoon_transfer.backends.cuda.cuda_server import CudaServer
from halfmoon_transfer.backends.cuda.opened_regions import OpenedRegion, OpenedRegionTable
from halfmoon_transfer.devices.device_interface import CopyEvent, DeviceError
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, access_refusal


class CudaBackend:
    """Both sides of handles."""

    name = "cuda"

    def __init__(self, home: EngineContext) -> None:
        self.slice_bytes = home.settings.copy_slice_bytes
        self._host_id = home.host_id
        self._devices = home.devices
        self._server = CudaServer(
            home.regions,
            label=f"halfmoon-transfer-{home.name}-cuda",
            max_connections=home.settings.max_connections,
        )
        self._lock = threading.Lock()
        #: By segment name: the connection to its current start.
        self._peers: dict[str, CudaPeer] = {}
        self._opened = OpenedRegionTable(home.settings.max_mappings)
        #: For each batch being carried: the keys that were revoked since it began.
        self._active: list[set[bytes]] = []

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The name of our Unix socket."""
        return {self.name: Endpoint(self._server.address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer is on this host and hands out handles."""
        return peer.host_id == self._host_id and self.name in peer.endpoints

    def carry(self, errand: CarryRequest) -> Sequence[SliceOutcome]:
        """Copy between host memory of ours and device memory of the peer."""
        return self._carry(
            errand, [LocalRegion(view) for view in errand.local], [0] * len(errand.local)
        )

    def carry_direct(
        self, errand: CarryRequest, locals_: dict[bytes, LocalRegion]
    ) -> Sequence[SliceOutcome]:
        """The same where some of our memory is on devices, too."""
        slices = errand.batch.slices
        return self._carry(
            errand,
            [locals_[each.local.key] for each in slices],
            [each.local_offset for each in slices],
        )

    def _carry(
        self, errand: CarryRequest, locals_: Sequence[LocalRegion], offsets: Sequence[int]
    ) -> Sequence[SliceOutcome]:
        """Begin all copies, wait for all, and look at the owner before and after."""
        batch = errand.batch
        revoked: set[bytes] = set()
        with self._lock:
            self._active.append(revoked)
        try:
            peer = self._peer(errand.peer)
            with ExitStack() as used:
                found = {
                    key: self._use(used, peer, errand, key, revoked)
                    for key in {each.remote.key for each in batch.slices}
                }
                begun: list[CopyEvent | SliceOutcome] = []
                try:
                    for index, each in enumerate(batch.slices):
                        opened = found[each.remote.key]
                        begun.append(_begin(errand, index, opened, locals_[index], offsets[index]))
                finally:
                    # Whatever happens, nobody touches the memory afterwards.
                    outcomes = [
                        each if isinstance(each, SliceOutcome) else _end(errand, index, each)
                        for index, each in enumerate(begun)
                    ]
            peer.require_alive()
        except CudaPeerGone as gone:
            self._drop(errand.peer.name, errand.peer.endpoints[self.name].address)
            return same_outcome_for_all(batch, gone.fate, str(gone))
        finally:
            with self._lock:
                self._active = [each for each in self._active if each is not revoked]
        return [
            refusal_outcome(batch, each, AccessStatus.UNKNOWN_KEY, 0)
            if each.remote.key in revoked and outcome.kind is OutcomeKind.APPLIED
            else outcome
            for each, outcome in zip(batch.slices, outcomes, strict=True)
        ]

    def _use(
        self, used: ExitStack, peer: CudaPeer, errand: CarryRequest, key: bytes, revoked: set[bytes]
    ) -> OpenedRegion | AccessRefused:
        def make() -> OpenedRegion:
            granted = peer.ask(errand.batch.peer.generation, key, errand.stop)
            device = self._devices.find(granted.device)
            if device is None:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            return OpenedRegion(granted, device)

        try:
            opened = self._opened.use((peer.address, key), make)
        except AccessRefused as refused:
            return refused
        used.callback(self._opened.leave, opened)
        if key in revoked:
            # Another thread may have heard that between the answer and now.
            self._opened.drop((peer.address, key))
        return opened

    def notify(self, errand: CarryRequest) -> SliceOutcome:
        """This way carries no notices; the next one does."""
        return SliceOutcome(
            OutcomeKind.UNUSABLE, "cuda carries no notifications; enable shm or tcp as well"
        )

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """There is none of device memory."""
        return None

    def revoke(self, key: bytes) -> None:
        """Tell peers that opened it."""
        self._server.revoke(key)

    def evict(self, key: bytes) -> None:
        """Opened memory can't be taken away."""

    def forget(self, segment: str) -> None:
        """Hang up on a peer and close its memory."""
        peer = self._peers.get(segment)
        if peer is not None:
            self._drop(segment, peer.address)

    def gauges(self) -> BackendGauges:
        """Connections of both sides, and opened regions."""
        with self._lock:
            return BackendGauges(
                n_connections=self._server.n_connections + len(self._peers),
                n_mappings=len(self._opened),
                n_malformed=self._server.n_malformed,
            )

    def close(self) -> None:
        """Hang up on everybody and close their memory."""
        for segment in list(self._peers):
            self.forget(segment)
        self._server.close()

    def _peer(self, wanted: SegmentDescriptor) -> CudaPeer:
        """The connection to this owner, alive a moment ago."""
        address = wanted.endpoints[self.name].address
        with self._lock:
            peer = self._peers.get(wanted.name)
        if peer is not None and peer.address != address:
            self._drop(wanted.name, peer.address)
            peer = None
        if peer is not None:
            peer.require_alive()
            return peer
        made = CudaPeer(address, lambda key: self._on_revoked(address, key))
        with self._lock:
            peer = self._peers.setdefault(wanted.name, made)
        if peer is not made:
            made.close()
        return peer

    def _on_revoked(self, address: str, key: bytes) -> None:
        with self._lock:
            for revoked in self._active:
                revoked.add(key)
        self._opened.drop((address, key))

    def _drop(self, segment: str, address: str) -> None:
        """This start of an owner is gone, or not wanted any more."""
        with self._lock:
            peer = self._peers.get(segment)
            if peer is not None and peer.address == address:
                del self._peers[segment]
            else:
                peer = None
        self._opened.drop_owner(address)
        if peer is not None:
            peer.close()


def _begin(
    errand: CarryRequest,
    index: int,
    found: OpenedRegion | AccessRefused,
    local: LocalRegion,
    offset: int,
) -> CopyEvent | SliceOutcome:
    """Begin one slice's copy, or say why not."""
    batch, each = errand.batch, errand.batch.slices[index]
    if errand.stop.stopped:
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
    if index in errand.damage:
        # Nothing here is damaged on its way: what shall be, never lands.
        return refusal_outcome(batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)
    try:
        return _copy(batch.op == "write", each, found, local, offset)
    except DeviceError as error:
        return refusal_outcome(batch, each, AccessStatus.DEVICE_FAILED, error.code)


def _copy(
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


def _end(errand: CarryRequest, index: int, event: CopyEvent) -> SliceOutcome:
    try:
        event.wait()
    except DeviceError as error:
        each = errand.batch.slices[index]
        return refusal_outcome(errand.batch, each, AccessStatus.DEVICE_FAILED, error.code)
    return APPLIED
