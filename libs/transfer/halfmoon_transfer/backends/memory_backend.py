"""Copy between engines of one process.

An engine reaches its own regions the same way. No wire is crossed, so checksums are compared only
on request (`verify` of `TransferEngine.submit`).
"""

import secrets
import threading
from collections.abc import Sequence

from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
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

#: Prefix of the addresses of this process.
_PROCESS = secrets.token_hex(8)
#: The open engines of this process with this backend, by address.
_contexts: dict[str, EngineContext] = {}
_lock = threading.Lock()


class MemoryBackend:
    """Copies within this process."""

    name = "memory"
    capabilities = BackendCapabilities(
        other_processes=False,
        host_memory=True,
        notifications=True,
        views=True,
        checks_accesses=True,
    )

    def __init__(self, context: EngineContext) -> None:
        self.slice_bytes = context.settings.copy_slice_bytes
        self._address = f"{_PROCESS}/{secrets.token_hex(8)}"
        with _lock:
            _contexts[self._address] = context

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """A random name in the directory of this process."""
        return {self.name: Endpoint(self._address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer is, or was, an engine of this process."""
        endpoint = peer.endpoints.get("memory")
        return endpoint is not None and endpoint.address.startswith(_PROCESS)

    def can_copy_inline(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Return whether the owner is open and no slice is in a file, which may block."""
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
        """Put the notification into the owner's queue."""
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
        """Return the owner's bytes."""
        owner = _find(peer)
        return None if owner is None else owner.regions.view(peer.generation, key)

    def revoke(self, key: bytes) -> None:
        """Do nothing: engines of one process hold nothing of each other."""

    def evict(self, key: bytes) -> None:
        """Do nothing: a copy ends by itself."""

    def forget(self, segment: str) -> None:
        """Do nothing: there are no connections."""

    def gauges(self) -> BackendGauges:
        """Return zeros: there are no connections or mappings."""
        return BackendGauges()

    def close(self) -> None:
        """Remove the engine from the directory."""
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
            # The bytes may lie in a file; then the owner loads them, or stores them.
            spans = {index: RegionSpan(each.remote.key, each.remote_offset, remote)}
            failed = regions.backed.load(spans) if batch.op == "read" else {}
            outcome = APPLIED if failed else copy_slice(request, index, remote)
            if batch.op == "write" and outcome.kind is OutcomeKind.APPLIED:
                failed = regions.backed.store(spans)
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
