"""Copy between this process's memory and memory of another that both have mapped.

A region is requested by its key once (`shm_wire`), mapped and kept. Only memory from
`TransferEngine.allocate` can be mapped. Other memory is borrowed for each batch, and the kernel
copies between the two processes (`process_vm`). Where the kernel does not allow that, this path is
unusable and the next one is taken.

No wire is crossed, so bytes are compared only on request (`verify` of `TransferEngine.submit`). A
copy is applied when it is done.
"""

from collections.abc import Mapping, Sequence

from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
    refusal_outcome,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.memory_backend import copy_slice
from halfmoon_transfer.backends.shm.mapped_regions import MappedRegions
from halfmoon_transfer.backends.shm.native_copy import find_copy
from halfmoon_transfer.backends.shm.process_vm_region import ProcessVmRegion
from halfmoon_transfer.backends.shm.shm_peer import PeerOfOtherUser, ShmPeer
from halfmoon_transfer.backends.shm.shm_server import ShmServer
from halfmoon_transfer.backends.shm.shm_wire import ShmNotification
from halfmoon_transfer.backends.unix_peer import UnixPeerGone
from halfmoon_transfer.backends.unix_peer_table import UnixPeerTable, refuse_revoked
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
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=True,
        notifications=True,
        views=True,
        checks_accesses=False,
    )

    def __init__(self, context: EngineContext) -> None:
        self.slice_bytes = context.settings.copy_slice_bytes
        self._host_id = context.host_id
        # A process of our user can read our memory, and our key, without asking.
        our_user_only = context.settings.cluster_key is not None
        self._borrows = context.settings.cross_memory_attach
        self._native_copy = find_copy() if context.settings.native else None
        self._server = ShmServer(
            context.regions,
            context.notification_queue,
            label=f"halfmoon-transfer-{context.name}-shm",
            max_connections=context.settings.max_connections,
            our_user_only=our_user_only,
        )
        self._mapped = MappedRegions(context.settings.max_mappings)
        self._peers = UnixPeerTable[ShmPeer](
            self.name,
            lambda address, on_revoked: ShmPeer(address, on_revoked, our_user_only=our_user_only),
            self._mapped,
        )

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The name of our Unix socket."""
        return {self.name: Endpoint(self._server.address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer is on this host and shares memory."""
        return peer.host_id == self._host_id and self.name in peer.endpoints

    def can_copy_inline(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Return whether the peer is connected and all regions of the batch are mapped."""
        known = self._peers.known(peer.name)
        return known is not None and self._mapped.holds_all(known.address, batch.slices)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Copy slice by slice, and check before and after that the owner is alive."""
        batch = request.batch
        revoked = self._peers.begin_batch()
        try:
            peer = self._peers.get(request.peer)
            if batch.op == "read":
                outcomes = self._copy(request, peer, revoked)
            else:
                try:
                    peer.begin_copy()
                    outcomes = self._copy(request, peer, revoked)
                finally:
                    peer.end_copy()
            peer.require_alive()
        except PeerOfOtherUser as other:
            return same_outcome_for_all(batch, OutcomeKind.UNUSABLE, str(other))
        except UnixPeerGone as gone:
            self._peers.drop(request.peer)
            return same_outcome_for_all(batch, gone.kind, str(gone))
        finally:
            self._peers.end_batch(revoked)
        return refuse_revoked(batch, outcomes, revoked) if revoked else outcomes

    def _copy(
        self, request: CarryRequest, peer: ShmPeer, revoked: set[bytes]
    ) -> Sequence[SliceOutcome]:
        """Map or borrow what a batch reaches, and copy.

        Raises:
            UnixPeerGone: the owner is gone; nothing counts as copied.
        """
        batch = request.batch
        reached: dict[bytes, memoryview | ProcessVmRegion | AccessRefused] = {}
        try:
            for each in batch.slices:
                key = each.remote.key
                if key not in reached:
                    mapped = self._mapped.use((peer.address, key))
                    reached[key] = (
                        self._reach(peer, request, key, revoked) if mapped is None else mapped
                    )
            outcomes = self._copy_at_once(request, reached)
            if outcomes is None:
                outcomes = [
                    SliceOutcome(OutcomeKind.LOST, "stopped")
                    if request.stop.stopped
                    else _copy(request, index, each, reached[each.remote.key])
                    for index, each in enumerate(batch.slices)
                ]
            for memory in reached.values():
                if isinstance(memory, ProcessVmRegion):
                    memory.require_alive()
            return outcomes
        finally:
            for key, memory in reached.items():
                if isinstance(memory, ProcessVmRegion):
                    peer.give_back(batch.peer.generation, key)

    def _copy_at_once(
        self,
        request: CarryRequest,
        reached: Mapping[bytes, memoryview | ProcessVmRegion | AccessRefused],
    ) -> Sequence[SliceOutcome] | None:
        """Copy the whole batch by the extension; return None, with nothing copied, if it can't."""
        if self._native_copy is None or len(reached) != 1:
            return None
        (memory,) = reached.values()
        if not isinstance(memory, memoryview):
            return None
        return self._native_copy.copy_batch(request, memory)

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver the notification over the Unix socket."""
        batch = request.batch
        assert batch.notification is not None
        try:
            self._peers.get(request.peer).notify(
                ShmNotification(batch.peer.generation, batch.notification), request.stop
            )
        except AccessRefused as refused:
            return refusal_outcome(batch, batch.slices[0], refused.status, refused.detail)
        except PeerOfOtherUser as other:
            return SliceOutcome(OutcomeKind.UNUSABLE, str(other))
        except UnixPeerGone as gone:
            self._peers.drop(request.peer)
            return SliceOutcome(gone.kind, str(gone))
        return APPLIED

    def _reach(
        self, peer: ShmPeer, request: CarryRequest, key: bytes, revoked: set[bytes]
    ) -> memoryview | ProcessVmRegion | AccessRefused:
        """Return a region mapped, or else borrowed until it is given back, or why not."""
        generation = request.batch.peer.generation
        try:
            memory = self._map(peer, generation, key, request.stop, revoked)
            if memory is not None:
                return memory
            process = peer.process() if self._borrows else None
            if process is None:
                return AccessRefused(AccessStatus.NOT_SHAREABLE)
            lent = peer.borrow(generation, key, request.stop)
        except AccessRefused as refused:
            return refused
        return ProcessVmRegion(peer, process, lent)

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return the mapped memory, read-only; None if the owner is gone or it can't be mapped."""
        revoked = self._peers.begin_batch()
        try:
            owner = self._peers.get(peer)
            stop = StopSignal.after(_VIEW_S)
            memory = self._map(owner, peer.generation, key, stop, revoked)
            return None if memory is None else memory.toreadonly()
        except PeerOfOtherUser:
            return None
        except UnixPeerGone:
            self._peers.drop(peer)
            return None
        finally:
            self._peers.end_batch(revoked)

    def revoke(self, key: bytes) -> None:
        """Tell peers that mapped the region."""
        self._server.revoke(key)

    def evict(self, key: bytes) -> None:
        """Do nothing: mapped memory can't be taken away."""

    def hang_up(self) -> None:
        """Cut off all peers; a copy that has begun goes on, see `is_quiet`."""
        self._server.cut_off()

    def is_quiet(self) -> bool:
        """Return whether no peer that was cut off may still be in the middle of a copy."""
        return self._server.is_quiet()

    def forget(self, segment: str) -> None:
        """Hang up on a peer and unmap its memory."""
        self._peers.forget(segment)

    def gauges(self) -> BackendGauges:
        """Return the connections of both sides, and the mappings."""
        return BackendGauges(
            n_connections=self._server.n_connections + len(self._peers),
            n_mappings=len(self._mapped),
            n_malformed=self._server.n_malformed,
        )

    def close(self) -> None:
        """Hang up on all peers; memory with a view stays mapped until the view is gone."""
        self._peers.close()
        self._server.close()

    def _map(
        self, peer: ShmPeer, generation: int, key: bytes, stop: StopSignal, revoked: set[bytes]
    ) -> memoryview | None:
        """Return a region's mapped memory; None if it is in memory that can't be mapped.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """

        def make() -> memoryview | None:
            try:
                return peer.map(generation, key, stop)
            except AccessRefused as refused:
                if refused.status is not AccessStatus.NOT_SHAREABLE:
                    raise
                return None

        return self._mapped.get((peer.address, key), make, revoked)


def _copy(
    request: CarryRequest,
    index: int,
    each: Slice,
    memory: memoryview | ProcessVmRegion | AccessRefused,
) -> SliceOutcome:
    if isinstance(memory, AccessRefused):
        return refusal_outcome(request.batch, each, memory.status, memory.detail)
    if isinstance(memory, ProcessVmRegion):
        return memory.copy(request, index, each)
    if not is_within(each.remote_offset, each.length, len(memory)):
        return refusal_outcome(request.batch, each, AccessStatus.OUT_OF_BOUNDS, len(memory))
    return copy_slice(request, index, memory[each.remote_offset : each.remote_offset + each.length])
