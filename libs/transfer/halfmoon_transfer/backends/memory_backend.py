"""Between engines of one process: a copy, or a view.

Also how an engine reaches its own regions. No wire is crossed, so bytes are compared by
checksum only when that is asked for (`faults` asks).
"""

import secrets
import threading
from collections.abc import Sequence

from halfmoon_transfer.backends.backend_interface import (
    BackendGauges,
    CarryRequest,
    EngineContext,
    refusal_outcome,
)
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import (
    APPLIED,
    Batch,
    OutcomeKind,
    Slice,
    SliceOutcome,
)
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.backed_regions import RegionSpan
from halfmoon_transfer.regions.byte_ops import checksum, copy_bytes, flip_byte
from halfmoon_transfer.regions.region_table import RegionTable

#: What addresses of this process begin with.
_PROCESS = secrets.token_hex(8)
#: All open engines of this process that can be reached so, by address.
_contexts: dict[str, EngineContext] = {}
_lock = threading.Lock()


class MemoryBackend:
    """Copies within this process."""

    name = "memory"

    def __init__(self, context: EngineContext) -> None:
        self.slice_bytes = context.settings.copy_slice_bytes
        self._address = f"{_PROCESS}/{secrets.token_hex(8)}"
        with _lock:
            _contexts[self._address] = context

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """A random name in this process's directory."""
        return {self.name: Endpoint(self._address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer is, or was, an engine of this process."""
        endpoint = peer.endpoints.get("memory")
        return endpoint is not None and endpoint.address.startswith(_PROCESS)

    def can_copy_inline(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Unless the owner has files: those may keep us waiting."""
        owner = _find(peer)
        return owner is not None and not (
            owner.regions.backed
            and any(each.remote.key in owner.regions.backed for each in batch.slices)
        )

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Copy slice by slice."""
        owner = _find(request.peer)
        outcomes: list[SliceOutcome] = []
        for index, each in enumerate(request.batch.slices):
            if request.stop.stopped:
                outcomes.append(SliceOutcome(OutcomeKind.LOST, "stopped"))
            elif owner is None:
                outcomes.append(_gone(request))
            else:
                outcomes.append(_move(request, index, each, owner.regions))
        return outcomes

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Put it into the owner's inbox."""
        batch, owner = request.batch, _find(request.peer)
        assert batch.notification is not None
        if owner is None:
            return _gone(request)
        try:
            owner.notification_queue.deliver(batch.peer.generation, batch.notification)
        except AccessRefused as refused:
            return refusal_outcome(batch, batch.slices[0], refused.status, refused.detail)
        return APPLIED

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """The owner's own bytes."""
        owner = _find(peer)
        return None if owner is None else owner.regions.view(peer.generation, key)

    def revoke(self, key: bytes) -> None:
        """Nothing is held."""

    def evict(self, key: bytes) -> None:
        """Nothing is held."""

    def forget(self, segment: str) -> None:
        """Nothing is held."""

    def gauges(self) -> BackendGauges:
        """Nothing is held."""
        return BackendGauges()

    def close(self) -> None:
        """Leave the directory."""
        with _lock:
            _contexts.pop(self._address, None)


def _find(peer: SegmentDescriptor) -> EngineContext | None:
    endpoint = peer.endpoints.get("memory")
    return None if endpoint is None else _contexts.get(endpoint.address)


def _gone(request: CarryRequest) -> SliceOutcome:
    reason = f"segment {request.peer.name} is not open in this process any more"
    return SliceOutcome(OutcomeKind.LOST, reason)


def _move(request: CarryRequest, index: int, each: Slice, regions: RegionTable) -> SliceOutcome:
    batch = request.batch
    try:
        with regions.leases.lease(
            batch.peer.generation,
            each.remote.key,
            each.remote_offset,
            each.length,
            write=batch.op == "write",
        ) as remote:
            if not regions.backed:
                return copy_slice(request, index, remote)
            # What is leased may lie in a file; then the owner fetches it, or puts it back.
            spots = {index: RegionSpan(each.remote.key, each.remote_offset, remote)}
            failed = regions.backed.load(spots) if batch.op == "read" else {}
            outcome = APPLIED if failed else copy_slice(request, index, remote)
            if batch.op == "write" and outcome.kind is OutcomeKind.APPLIED:
                failed = regions.backed.store(spots)
            for refused in failed.values():
                raise refused
            return outcome
    except AccessRefused as refused:
        return refusal_outcome(batch, each, refused.status, refused.detail)


def copy_slice(request: CarryRequest, index: int, remote: memoryview) -> SliceOutcome:
    """Copy one slice between two views of this process, checked if asked for."""
    local = request.local[index]
    source, destination = (local, remote) if request.batch.op == "write" else (remote, local)
    if not request.verify and not request.damage:
        copy_bytes(destination, source)
        return APPLIED
    expected = checksum(source) if request.verify else None
    copy_bytes(destination, source)
    if index in request.damage:
        flip_byte(destination, request.damage[index])
    if expected is not None and checksum(destination) != expected:
        each = request.batch.slices[index]
        return refusal_outcome(request.batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)
    return APPLIED
