"""The router from this engine's regions to those of peers, and to its own.

Which backends reach whom, and what they are asked to do: carry a batch, show a region's
bytes, let go of one. Nothing here knows a transfer, and calls block as long as it takes.
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
#: How long a polite wait for a removed region's last access is; then connections are cut.
_POLITE_S = 1.0


class FastRoute(NamedTuple):
    """The best backend to a peer, and what it can do without a plan."""

    peer: SegmentDescriptor
    backend: Backend
    #: If it sometimes carries without waiting for anybody: whether it would do so now.
    can_copy_inline: Callable[[SegmentDescriptor, Batch], bool] | None
    #: If it sometimes has a connection at hand: moves a few pieces over that.
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
            context: what the backends belong to.
            directory: where peers are.
            backends: by name, best first.
            descriptor: what peers know of us.
        """
        self.backends = backends
        self._regions = context.regions
        self._device_carry = DeviceCarry(context.regions, context.devices, context.settings)
        self._directory = directory
        # Our own regions are reached by a copy, whatever the peers use.
        self._own_key = PeerKey(context.name, context.generation)
        self._own = MemoryBackend(context)
        self._own_descriptor = msgspec.structs.replace(descriptor, endpoints=self._own.endpoints)
        #: By path: whether a batch is a mere copy. `isinstance` with a protocol is slow.
        self._can_copy_inline = {
            backend.name: backend.can_copy_inline
            for backend in (*backends.values(), self._own)
            if isinstance(backend, SupportsInlineCopy)
        }
        #: By segment: what was found last, for this very descriptor.
        self._short: dict[str, FastRoute] = {}
        #: By path: how to carry over an idle connection.
        self._try_fast_path = {
            backend.name: backend.try_fast_path
            for backend in backends.values()
            if isinstance(backend, SupportsFastPath)
        }

    # Which way.

    def known_paths(self, key: PeerKey, *, fresh: bool) -> tuple[TransferPath, ...] | None:
        """How this peer is reached, best first; None if that must be looked up.

        Args:
            key: the peer.
            fresh: don't trust what is known of it.
        """
        if key == self._own_key:
            return (TransferPath(self._own.name, self._own.slice_bytes),)
        known = None if fresh else self._directory.cached(key.segment, key.generation)
        return None if known is None else self._paths(known)

    def look_up_paths(self, key: PeerKey, *, fresh: bool) -> tuple[tuple[TransferPath, ...], bool]:
        """The same for a peer that is not us, and whether it is news; may block on the store.

        Raises:
            Rejected: the segment is of another generation.
            Lost: there is no such segment, or the store can't say.
        """
        peer, moved = self._directory.resolve(key.segment, key.generation, fresh=fresh)
        return self._paths(peer), moved

    def fast_route(self, segment: str, generation: int) -> FastRoute | None:
        """The best way to a peer that is known, if it sometimes does without a plan."""
        own = segment == self._own_key.segment and generation == self._own_key.generation
        peer = self._own_descriptor if own else self._directory.cached(segment, generation)
        if peer is None:
            return None
        known = self._short.get(segment)
        if known is not None and known.peer is peer:
            return known
        backend = self._own if own else next(self._reaching(peer), None)
        if backend is None:
            return None
        can_copy_inline, try_fast_path = (
            self._can_copy_inline.get(backend.name),
            self._try_fast_path.get(backend.name),
        )
        known = self._short[segment] = FastRoute(peer, backend, can_copy_inline, try_fast_path)
        return known

    def _paths(self, peer: SegmentDescriptor) -> tuple[TransferPath, ...]:
        return tuple(
            TransferPath(backend.name, backend.slice_bytes, max(1, len(peer.rails(backend.name))))
            for backend in self._reaching(peer)
        )

    def _reaching(self, peer: SegmentDescriptor) -> Iterator[Backend]:
        return (backend for backend in self.backends.values() if backend.reaches(peer))

    # Bytes.

    def carry(self, batch: Batch, stop: StopSignal) -> Sequence[SliceOutcome]:
        """Carry a batch over the path that it names; an outcome per slice, whatever happens."""
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
        """Have this backend carry a batch; an outcome per slice, whatever happens."""
        try:
            if batch.notification is not None:
                return [backend.notify(CarryRequest(batch, peer, (), stop))]
            if self._device_carry.is_needed(batch):
                return self._device_carry.carry(CarryRequest(batch, peer, (), stop), backend)
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
                return backend.carry(CarryRequest(batch, peer, local, stop))
            finally:
                self._regions.leases.release_all(entries)
        except AccessRefused:
            return same_outcome_for_all(
                batch, OutcomeKind.REJECTED, "the local region was unregistered meanwhile"
            )
        except Exception as error:
            # A fault in a backend must not leave its transfer hanging.
            _log.exception("backend %s failed", batch.path)
            return same_outcome_for_all(
                batch, OutcomeKind.UNUSABLE, f"the backend failed: {error!r}"
            )

    def view(self, region: Region, offset: int, length: int) -> memoryview | None:
        """These bytes of a region, read-only and without a copy, if that is possible.

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
        """Know how a peer is reached; may block on the store.

        Raises:
            Rejected, Lost: as `look_up_paths`.
        """
        self._directory.resolve(segment, generation, fresh=False)

    def _peer(self, key: PeerKey) -> SegmentDescriptor:
        return self._directory.resolve(key.segment, key.generation, fresh=False)[0]

    # What ends.

    def revoke_region(self, entry: RegionEntry) -> None:
        """Let go of a region that was removed; returns when accesses over wires have ended."""
        for backend in self.backends.values():
            backend.revoke(entry.region.key)
        if not self._regions.leases.wait_until_idle(entry, _POLITE_S):
            for backend in self.backends.values():
                backend.evict(entry.region.key)
            if not self._regions.leases.wait_until_idle(entry, _POLITE_S):
                _log.warning("a region of segment %s is still being accessed", entry.region.segment)
        self._regions.discard(entry)

    def forget(self, segment: str) -> None:
        """Close what is held towards this peer."""
        self._directory.forget(segment)
        self._short.pop(segment, None)
        for backend in self.backends.values():
            backend.forget(segment)

    def gauges(self) -> list[BackendGauges]:
        """What each backend holds now."""
        return [backend.gauges() for backend in self.backends.values()]

    def close(self) -> None:
        """Take all regions back and close the backends; no transfer is live any more."""
        entries = self._regions.clear()
        for backend in reversed(list(self.backends.values())):
            backend.close()
        self._own.close()
        for entry in entries:
            # Copies that were made at once are not among the live transfers.
            self._regions.leases.wait_until_idle(entry, _POLITE_S)
            self._regions.discard(entry)
