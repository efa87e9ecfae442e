"""Choose the backends that lead to a peer, and call them.

A backend carries a batch, shows a region's bytes, or lets go of a region. Nothing here knows of
transfers, and calls block as long as they need.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import (
    Backend,
    BackendGauges,
    CarryRequest,
    EngineContext,
    SupportsFastPath,
    SupportsInlineCopy,
    SupportsSettling,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.device_carry import DeviceCarry
from halfmoon_transfer.backends.memory_backend import MemoryBackend
from halfmoon_transfer.interface import Lost, Op, Piece, Rejected, TransferError
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.metadata.segment_directory import SegmentDirectory
from halfmoon_transfer.planning.transfer_plan import (
    Batch,
    OutcomeKind,
    PeerKey,
    SliceOutcome,
    TransferPath,
)
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, is_within
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.threads.stop_signal import StopSignal

_log = logging.getLogger(__name__)
#: How long to wait for a removed region's last access before connections are cut.
_IDLE_WAIT_S = 1.0


class FastRoute(NamedTuple):
    """The best backend to a peer, with its fast paths."""

    peer: SegmentDescriptor
    backend: Backend
    #: Tells whether a batch is a mere copy now; None if it never is.
    can_copy_inline: Callable[[SegmentDescriptor, Batch], bool] | None
    #: Moves a few pieces over an idle connection; None without such connections.
    try_fast_path: (
        Callable[[SegmentDescriptor, Op, Sequence[Piece], tuple[memoryview, ...], float], bool]
        | None
    )


class PathRouter:
    """The backends of one engine. All methods are safe from any thread."""

    def __init__(
        self,
        context: EngineContext,
        directory: SegmentDirectory,
        backends: Mapping[str, Backend],
        descriptor: SegmentDescriptor,
    ) -> None:
        """Take these over, and close them at the end.

        Args:
            context: the engine that the backends belong to.
            directory: the descriptors of peers.
            backends: by name, best first.
            descriptor: our own, as peers know it.
        """
        self.backends = backends
        self._regions = context.regions
        self._device_carry = DeviceCarry(context.regions, context.devices, context.settings)
        self._directory = directory
        # Our own regions are reached by a copy, whatever backends there are.
        self._own_key = PeerKey(context.name, context.generation)
        self._own = MemoryBackend(context)
        self._own_descriptor = msgspec.structs.replace(descriptor, endpoints=self._own.endpoints)
        #: Fast copies by path; kept, as `isinstance` with a protocol is slow.
        self._can_copy_inline = {
            backend.name: backend.can_copy_inline
            for backend in (*backends.values(), self._own)
            if isinstance(backend, SupportsInlineCopy)
        }
        #: The last route by segment; valid for its descriptor only.
        self._fast_routes: dict[str, FastRoute] = {}
        #: The last paths by segment; valid for their descriptor only.
        self._known_paths: dict[str, tuple[SegmentDescriptor, tuple[TransferPath, ...]]] = {}
        #: Fast exchanges by path.
        self._try_fast_path = {
            backend.name: backend.try_fast_path
            for backend in backends.values()
            if isinstance(backend, SupportsFastPath)
        }

    # Paths.

    def known_paths(self, key: PeerKey, *, fresh: bool) -> tuple[TransferPath, ...] | None:
        """Return the paths to a peer, best first; None if it must be looked up.

        Args:
            key: the peer.
            fresh: whether the cached descriptor must not be used.
        """
        if key == self._own_key:
            return (TransferPath(self._own.name, self._own.slice_bytes),)
        known = None if fresh else self._directory.cached(key.segment, key.generation)
        return None if known is None else self._paths(known)

    def look_up_paths(self, key: PeerKey, *, fresh: bool) -> tuple[tuple[TransferPath, ...], bool]:
        """Look up the paths to a peer; return also whether it has moved. May block on the store.

        Raises:
            Rejected: the segment is of another generation.
            Lost: there is no such segment, or the store does not answer.
        """
        peer, moved = self._directory.resolve(key.segment, key.generation, fresh=fresh)
        return self._paths(peer), moved

    def fast_route(self, segment: str, generation: int) -> FastRoute | None:
        """Return the best route to a peer that is known; None for another peer."""
        own = segment == self._own_key.segment and generation == self._own_key.generation
        peer = self._own_descriptor if own else self._directory.cached(segment, generation)
        if peer is None:
            return None
        known = self._fast_routes.get(segment)
        if known is not None and known.peer is peer:
            return known
        backend = self._own if own else next(self._reaching(peer), None)
        if backend is None:
            return None
        can_copy_inline, try_fast_path = (
            self._can_copy_inline.get(backend.name),
            self._try_fast_path.get(backend.name),
        )
        known = self._fast_routes[segment] = FastRoute(
            peer, backend, can_copy_inline, try_fast_path
        )
        return known

    def _paths(self, peer: SegmentDescriptor) -> tuple[TransferPath, ...]:
        known = self._known_paths.get(peer.name)
        if known is not None and known[0] is peer:
            return known[1]
        paths = tuple(
            TransferPath(backend.name, backend.slice_bytes, max(1, len(peer.rails(backend.name))))
            for backend in self._reaching(peer)
        )
        self._known_paths[peer.name] = peer, paths
        return paths

    def _reaching(self, peer: SegmentDescriptor) -> Iterator[Backend]:
        return (backend for backend in self.backends.values() if backend.reaches(peer))

    # Bytes.

    def carry(self, batch: Batch, stop: StopSignal) -> Sequence[SliceOutcome]:
        """Carry a batch over the path that it names; return an outcome per slice."""
        if batch.peer == self._own_key:
            return self.move(batch, self._own_descriptor, self._own, stop)
        try:
            peer = self._peer(batch.peer)
        except TransferError as error:
            return same_outcome_for_all(batch, OutcomeKind.LOST, str(error))
        return self.move(batch, peer, self.backends[batch.path], stop)

    def move(
        self, batch: Batch, peer: SegmentDescriptor, backend: Backend, stop: StopSignal
    ) -> Sequence[SliceOutcome]:
        """Have this backend carry a batch; return an outcome per slice. Never raises."""
        try:
            if batch.notification is not None:
                return [backend.notify(CarryRequest(batch, peer, (), stop))]
            if self._device_carry.is_needed(batch):
                return self._device_carry.carry(
                    CarryRequest(batch, peer, (), stop, batch.verify), backend
                )
            regions = {each.local.key: each.local for each in batch.slices}.values()
            entries = self._regions.leases.acquire_regions(regions)
            try:
                views = {entry.region.key: entry.view for entry in entries}
                local = tuple(
                    [
                        views[each.local.key][each.local_offset : each.local_offset + each.length]
                        for each in batch.slices
                    ]
                )
                return backend.carry(CarryRequest(batch, peer, local, stop, batch.verify))
            finally:
                self._regions.leases.release_all(entries)
        except AccessRefused:
            return same_outcome_for_all(
                batch, OutcomeKind.REJECTED, "the local region was unregistered meanwhile"
            )
        except Exception as error:
            # A bug in a backend must not leave its transfer hanging.
            _log.exception("backend %s failed", batch.path)
            return same_outcome_for_all(
                batch, OutcomeKind.UNUSABLE, f"the backend failed: {error!r}"
            )

    def view(self, region: Region, offset: int, length: int) -> memoryview | None:
        """Return these bytes of a region, read-only and without a copy; None if it can't.

        Raises:
            Rejected: out of bounds, unknown key, or another generation.
        """
        whole = self._whole(region)
        if whole is None:
            return None
        if not is_within(offset, length, len(whole)):
            raise Rejected(
                f"view of {length} bytes at offset {offset} of a region of segment "
                f"{region.segment}, which has {len(whole)} bytes"
            )
        return whole[offset : offset + length]

    def _whole(self, region: Region) -> memoryview | None:
        key = PeerKey(region.segment, region.generation)
        try:
            if key == self._own_key:
                return self._regions.view(region.generation, region.key)
            peer = self._peer(key)
            found = (backend.view(peer, region.key) for backend in self._reaching(peer))
            return next((view for view in found if view is not None), None)
        except Lost:
            return None
        except AccessRefused as refused:
            if refused.status is AccessStatus.NOT_SHAREABLE:
                return None
            raise Rejected(f"view of a region of segment {region.segment}: {refused}") from None

    def resolve_peer(self, segment: str, generation: int) -> None:
        """Look a peer up before it is needed; may block on the store.

        Raises:
            Rejected, Lost: like `look_up_paths`.
        """
        self._directory.resolve(segment, generation, fresh=False)

    def knows_peer(self, segment: str, generation: int) -> bool:
        """Return whether this start of a segment is known, so that no store is read."""
        return self._directory.cached(segment, generation) is not None

    def is_unsettled(self, segment: str, generation: int) -> bool:
        """Return whether bytes of a write that was given up may still land at this segment."""
        peer = self._directory.cached(segment, generation)
        return peer is not None and any(
            backend.is_unsettled(peer)
            for backend in self._reaching(peer)
            if isinstance(backend, SupportsSettling)
        )

    def settle(self, segment: str, generation: int, stop: StopSignal) -> None:
        """Return when no byte of a write that was given up can land at this segment any more.

        Raises:
            Lost: it does not confirm it before the deadline of `stop`.
        """
        peer = self._directory.cached(segment, generation)
        if peer is None:
            return  # nothing was ever written there
        for backend in self._reaching(peer):
            if isinstance(backend, SupportsSettling):
                backend.settle(peer, stop)

    def _peer(self, key: PeerKey) -> SegmentDescriptor:
        return self._directory.resolve(key.segment, key.generation, fresh=False)[0]

    # The end.

    def revoke_region(self, entry: RegionEntry) -> None:
        """Release a removed region; return when accesses over wires have ended."""
        for backend in self.backends.values():
            backend.revoke(entry.region.key)
        self.end_accesses(entry)
        self._regions.discard(entry)

    def end_accesses(self, entry: RegionEntry, patience_s: float = _IDLE_WAIT_S) -> bool:
        """Return when accesses over wires to a removed region or grant have ended.

        Backends are not told of a grant's end: none has mapped, registered or announced it.

        Args:
            entry: its key is removed.
            patience_s: seconds until accesses that go on are cut off.

        Returns:
            False if one has not ended even so.
        """
        idle = self._regions.leases.wait_until_idle(entry, patience_s)
        if not idle:
            for backend in self.backends.values():
                backend.evict(entry.region.key)
            idle = self._regions.leases.wait_until_idle(entry, _IDLE_WAIT_S)
            if not idle:
                _log.warning("a region of segment %s is still being accessed", entry.region.segment)
        return idle

    def forget(self, segment: str) -> None:
        """Close connections to this peer and release its memory."""
        self._directory.forget(segment)
        self._fast_routes.pop(segment, None)
        self._known_paths.pop(segment, None)
        for backend in self.backends.values():
            backend.forget(segment)

    def gauges(self) -> list[BackendGauges]:
        """Return the numbers of each backend."""
        return [backend.gauges() for backend in self.backends.values()]

    def close(self) -> None:
        """Remove all regions and close the backends; no transfer is live any more."""
        entries = self._regions.clear()
        for backend in reversed(list(self.backends.values())):
            backend.close()
        self._own.close()
        for entry in entries:
            # Copies of the fast path are not among the live transfers.
            self._regions.leases.wait_until_idle(entry, _IDLE_WAIT_S)
            self._regions.discard(entry)
