"""Copies between this process's memory and memory of another that both have mapped.

A region is asked for by its key once (`wire`), mapped and kept, the least recently used one
dropped beyond a bound. Only memory from `TransferEngine.allocate` can be mapped. Other memory is
borrowed for each batch, and the kernel copies between the two processes (`across`); where it
does not allow that, this path is unusable and the next one is taken. No wire is crossed, so
checksums are made only when asked for. A copy is applied when it is done.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from halfmoon_transfer.backends.backend_interface import (
    BackendGauges,
    CarryRequest,
    EngineContext,
    refusal_outcome,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.memory_backend import copy_slice
from halfmoon_transfer.backends.shm.process_vm_region import ProcessVmRegion
from halfmoon_transfer.backends.shm.shm_peer import PeerOfOtherUser, ShmPeer, ShmPeerGone
from halfmoon_transfer.backends.shm.shm_server import ShmServer
from halfmoon_transfer.backends.shm.shm_wire import ShmNotification
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import (
    APPLIED,
    Batch,
    OutcomeKind,
    Slice,
    SliceOutcome,
)
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, is_within
from halfmoon_transfer.threads.stop_signal import StopSignal

_VIEW_S = 2.0


class ShmBackend:
    """Both sides of shared memory."""

    name = "shm"

    def __init__(self, home: EngineContext) -> None:
        self.slice_bytes = home.settings.copy_slice_bytes
        self._host_id = home.host_id
        # Who runs as our user can look into our memory, and at our key, without asking.
        self._our_user_only = home.settings.cluster_key is not None
        self._borrows = home.settings.cross_memory_attach
        self._max_mappings = home.settings.max_mappings
        self._server = ShmServer(
            home.regions,
            home.inbox,
            label=f"halfmoon-transfer-{home.name}-shm",
            max_connections=home.settings.max_connections,
            our_user_only=self._our_user_only,
        )
        self._lock = threading.Lock()
        #: By segment name: the connection to its current start.
        self._peers: dict[str, ShmPeer] = {}
        #: By owner's address and region key, the most recently used last; None: can't be mapped.
        self._mappings: OrderedDict[tuple[str, bytes], memoryview | None] = OrderedDict()
        #: For each batch being carried: the keys that were revoked since it began.
        self._active: list[set[bytes]] = []

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The name of our Unix socket."""
        return {self.name: Endpoint(self._server.address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer is on this host and shares memory."""
        return peer.host_id == self._host_id and self.name in peer.endpoints

    def at_once(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """If the peer is known and has granted all these regions."""
        known = self._peers.get(peer.name)
        return known is not None and all(
            self._mappings.get((known.address, each.remote.key)) is not None
            for each in batch.slices
        )

    def carry(self, errand: CarryRequest) -> Sequence[SliceOutcome]:
        """Copy slice by slice, with a look at the owner before and after."""
        batch = errand.batch
        revoked: set[bytes] = set()
        with self._lock:
            self._active.append(revoked)
        try:
            peer = self._peer(errand.peer)
            wholes: dict[bytes, memoryview | ProcessVmRegion | AccessRefused] = {}
            try:
                for each in batch.slices:
                    if each.remote.key not in wholes:
                        wholes[each.remote.key] = self._reach(peer, errand, each.remote.key)
                outcomes = [
                    SliceOutcome(OutcomeKind.LOST, "stopped")
                    if errand.stop.stopped
                    else _move(errand, index, each, wholes[each.remote.key])
                    for index, each in enumerate(batch.slices)
                ]
                for whole in wholes.values():
                    if isinstance(whole, ProcessVmRegion):
                        whole.require_alive()
            finally:
                for key, whole in wholes.items():
                    if isinstance(whole, ProcessVmRegion):
                        peer.give_back(batch.peer.generation, key)
            peer.require_alive()
        except PeerOfOtherUser as other:
            return same_outcome_for_all(batch, OutcomeKind.UNUSABLE, str(other))
        except ShmPeerGone as gone:
            self._drop(errand.peer.name, errand.peer.endpoints[self.name].address)
            return same_outcome_for_all(batch, gone.fate, str(gone))
        finally:
            with self._lock:
                self._active = [each for each in self._active if each is not revoked]
        if not revoked:
            return outcomes
        return [
            refusal_outcome(batch, each, AccessStatus.UNKNOWN_KEY, 0)
            if each.remote.key in revoked and outcome.kind is OutcomeKind.APPLIED
            else outcome
            for each, outcome in zip(batch.slices, outcomes, strict=True)
        ]

    def notify(self, errand: CarryRequest) -> SliceOutcome:
        """Deliver the notice over the Unix socket."""
        batch = errand.batch
        assert batch.notification is not None
        try:
            self._peer(errand.peer).notify(
                ShmNotification(batch.peer.generation, batch.notification), errand.stop
            )
        except AccessRefused as refused:
            return refusal_outcome(batch, batch.slices[0], refused.status, refused.detail)
        except PeerOfOtherUser as other:
            return SliceOutcome(OutcomeKind.UNUSABLE, str(other))
        except ShmPeerGone as gone:
            self._drop(errand.peer.name, errand.peer.endpoints[self.name].address)
            return SliceOutcome(gone.fate, str(gone))
        return APPLIED

    def _reach(
        self, peer: ShmPeer, errand: CarryRequest, key: bytes
    ) -> memoryview | ProcessVmRegion | AccessRefused:
        """A region mapped, or else borrowed until it is given back, or why it can't be."""
        generation = errand.batch.peer.generation
        try:
            whole = self._mapping(peer, generation, key, errand.stop)
            if whole is not None:
                return whole
            process = peer.process() if self._borrows else None
            if process is None:
                return AccessRefused(AccessStatus.NOT_SHAREABLE)
            lent = peer.borrow(generation, key, errand.stop)
        except AccessRefused as refused:
            return refused
        return ProcessVmRegion(peer, process, lent)

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """The mapped memory, read-only; None when the owner is gone or it can't be mapped."""
        try:
            owner = self._peer(peer)
            stop = StopSignal.after(_VIEW_S)
            whole = self._mapping(owner, peer.generation, key, stop)
            return None if whole is None else whole.toreadonly()
        except PeerOfOtherUser:
            return None
        except ShmPeerGone:
            self._drop(peer.name, peer.endpoints[self.name].address)
            return None

    def revoke(self, key: bytes) -> None:
        """Tell peers that mapped it."""
        self._server.revoke(key)

    def evict(self, key: bytes) -> None:
        """Mapped memory can't be taken away."""

    def forget(self, segment: str) -> None:
        """Hang up on a peer and unmap its memory."""
        peer = self._peers.get(segment)
        if peer is not None:
            self._drop(segment, peer.address)

    def gauges(self) -> BackendGauges:
        """Connections of both sides, and mappings."""
        with self._lock:
            return BackendGauges(
                n_connections=self._server.n_connections + len(self._peers),
                n_mappings=sum(each is not None for each in self._mappings.values()),
                n_malformed=self._server.n_malformed,
            )

    def close(self) -> None:
        """Hang up on everybody; memory that is viewed stays mapped until the view is gone."""
        for segment in list(self._peers):
            self.forget(segment)
        self._server.close()

    def _peer(self, wanted: SegmentDescriptor) -> ShmPeer:
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
        made = ShmPeer(
            address,
            lambda key: self._on_revoked(address, key),
            our_user_only=self._our_user_only,
        )
        with self._lock:
            peer = self._peers.setdefault(wanted.name, made)
        if peer is not made:
            made.close()
        return peer

    def _mapping(
        self, peer: ShmPeer, generation: int, key: bytes, stop: StopSignal
    ) -> memoryview | None:
        """A region, mapped; None if it is in memory that can't be.

        Raises:
            Refused: the owner says no.
            PeerGone: it says nothing, or nothing that makes sense.
        """
        place = (peer.address, key)
        with self._lock:
            if place in self._mappings:
                self._mappings.move_to_end(place)
                return self._mappings[place]
        made: memoryview | None
        try:
            made = peer.map(generation, key, stop)
        except AccessRefused as refused:
            if refused.status is not AccessStatus.NOT_SHAREABLE:
                raise
            made = None
        with self._lock:
            whole = self._mappings.setdefault(place, made)
            while len(self._mappings) > self._max_mappings:
                # Unmapped with its last view: another thread may be copying.
                self._mappings.popitem(last=False)
        return whole

    def _on_revoked(self, address: str, key: bytes) -> None:
        with self._lock:
            self._mappings.pop((address, key), None)
            for revoked in self._active:
                revoked.add(key)

    def _drop(self, segment: str, address: str) -> None:
        """This start of an owner is gone, or not wanted any more."""
        with self._lock:
            peer = self._peers.get(segment)
            if peer is not None and peer.address == address:
                del self._peers[segment]
            else:
                peer = None
            for place in [place for place in self._mappings if place[0] == address]:
                del self._mappings[place]
        if peer is not None:
            peer.close()


def _move(
    errand: CarryRequest,
    index: int,
    each: Slice,
    whole: memoryview | ProcessVmRegion | AccessRefused,
) -> SliceOutcome:
    if isinstance(whole, AccessRefused):
        return refusal_outcome(errand.batch, each, whole.status, whole.detail)
    if isinstance(whole, ProcessVmRegion):
        return whole.move(errand, index, each)
    if not is_within(each.remote_offset, each.length, len(whole)):
        return refusal_outcome(errand.batch, each, AccessStatus.OUT_OF_BOUNDS, len(whole))
    return copy_slice(errand, index, whole[each.remote_offset : each.remote_offset + each.length])
