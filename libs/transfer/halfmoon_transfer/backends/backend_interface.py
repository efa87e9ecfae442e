"""What a backend is: one way to move bytes between this engine's regions and a peer's.

A backend is opened with its engine, listens if it needs to, and carries batches in threads
of the engine. It never raises for what the world does: every slice gets an outcome.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from halfmoon_transfer.devices.device_table import DeviceTable
from halfmoon_transfer.interface import Op, Piece
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.planning.topology import Topology
from halfmoon_transfer.planning.transfer_plan import (
    APPLIED,
    Batch,
    OutcomeKind,
    Slice,
    SliceOutcome,
)
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.settings import TransferSettings
from halfmoon_transfer.threads.stop_signal import StopSignal


class EngineContext(msgspec.Struct, frozen=True):
    """What a backend knows of the engine it belongs to."""

    name: str
    generation: int
    host_id: str
    bind: str
    port: int
    advertise: str | None
    #: Further addresses to listen at, each with what peers should dial for it.
    more: tuple[tuple[str, str | None], ...]
    #: Which cards are near which memory; None: all are.
    topology: Topology | None
    regions: RegionTable
    #: The devices whose memory is among them.
    devices: DeviceTable
    #: Where notifications from peers go.
    notification_queue: NotificationQueue
    settings: TransferSettings


class CarryRequest(msgspec.Struct, frozen=True):
    """One batch, and all that carrying it needs."""

    batch: Batch
    peer: SegmentDescriptor
    #: This process's bytes of each slice: the source of a write, the destination of a read.
    local: tuple[memoryview, ...]
    stop: StopSignal
    #: Check the bytes even if no wire is crossed.
    verify: bool = False
    #: By position in the batch: the byte to damage in flight. Only `faults` sets it.
    damage: dict[int, int] = {}
    #: Called for each part that goes over one rail, in place of carrying it. Only `faults` sets it.
    rail_hook: "RailHook | None" = None


#: Given a rail's address, what is to be carried over it, and who would carry it.
RailHook = Callable[
    [str, CarryRequest, Callable[[CarryRequest], Sequence[SliceOutcome]]], Sequence[SliceOutcome]
]


class Backend(Protocol):
    """One way. Methods are safe from any thread."""

    name: str
    #: The size of slices that suits it.
    slice_bytes: int

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What to publish for peers, by the name that they know it under."""
        ...

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether it is worth a try, by the peer's descriptor alone; asks nobody."""
        ...

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch and return one outcome per slice, in order. Blocks.

        When it returns, nobody touches the local bytes any more.
        """
        ...

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver the batch's notice into the peer's inbox. Blocks.

        `UNUSABLE` when this way carries none; the next path is taken then.
        """
        ...

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """All bytes of a peer's region, read-only, without a copy; None if it has no way."""
        ...

    def revoke(self, key: bytes) -> None:
        """One of our regions is gone: tell whoever holds on to it."""
        ...

    def evict(self, key: bytes) -> None:
        """An access to a region that is gone does not end: cut it off."""
        ...

    def forget(self, segment: str) -> None:
        """Close what is held towards this peer."""
        ...

    def gauges(self) -> "BackendGauges":
        """What is held now."""
        ...

    def close(self) -> None:
        """Stop listening and close everything; no batch is being carried any more."""
        ...


@runtime_checkable
class SupportsInlineCopy(Protocol):
    """A backend that sometimes carries without waiting for anybody: it copies memory."""

    def can_copy_inline(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Whether carrying this batch now takes no longer than copying its bytes."""
        ...


@runtime_checkable
class SupportsFastPath(Protocol):
    """A backend that has a short way over a wire: a connection that is open and idle."""

    def try_fast_path(
        self,
        peer: SegmentDescriptor,
        op: Op,
        pieces: Sequence[Piece],
        local: tuple[memoryview, ...],
        deadline: float,
    ) -> bool:
        """Move a few pieces over an idle connection; whether all of them are applied.

        If not, there may be no such connection, or some are applied: all may be tried again
        at once. When it returns, nobody touches the local bytes any more.

        Args:
            peer: whom the pieces are of.
            op: which way the bytes go.
            pieces: of at least one byte each, and within the bounds of their regions.
            local: this process's bytes of each.
            deadline: when to give up, on the monotonic clock.
        """
        ...


class BackendGauges(msgspec.Struct, frozen=True):
    """What a backend holds now, and what it refused to read so far."""

    n_connections: int = 0
    n_mappings: int = 0
    n_malformed: int = 0


def same_outcome_for_all(batch: Batch, fate: OutcomeKind, reason: str) -> list[SliceOutcome]:
    """All slices of a batch share one fate."""
    return [SliceOutcome(fate, reason)] * len(batch.slices)


def refusal_outcome(batch: Batch, each: Slice, status: AccessStatus, detail: int) -> SliceOutcome:
    """What an owner's refusal means for a slice, in words."""
    if status is AccessStatus.OK:
        return APPLIED
    where = f"{batch.op} of {each.length} bytes at offset {each.remote_offset}"
    if batch.notification is not None:
        where = f"a notification of {len(batch.notification.message)} bytes"
    region = f"a region of segment {batch.peer.segment}"
    match status:
        case AccessStatus.OUT_OF_BOUNDS:
            return SliceOutcome(
                OutcomeKind.REJECTED, f"{where} of {region}, which has {detail} bytes"
            )
        case AccessStatus.UNKNOWN_KEY:
            reason = f"{where}: segment {batch.peer.segment} has no region of this key (any more)"
            return SliceOutcome(OutcomeKind.REJECTED, reason)
        case AccessStatus.READ_ONLY:
            return SliceOutcome(OutcomeKind.REJECTED, f"{where} of {region}, which is read-only")
        case AccessStatus.OTHER_GENERATION:
            reason = (
                f"{where}: segment {batch.peer.segment} is of generation {detail} now, "
                f"the region is of generation {batch.peer.generation}"
            )
            return SliceOutcome(OutcomeKind.STALE, reason)
        case AccessStatus.CHECKSUM_MISMATCH:
            return SliceOutcome(
                OutcomeKind.CORRUPTED, f"{where} of {region}: the checksum does not match"
            )
        case AccessStatus.NO_ROOM:
            reason = (
                f"{where}: segment {batch.peer.segment} has {detail} notifications that nobody "
                "took, the limit; it must take them with `notifications`"
            )
            return SliceOutcome(OutcomeKind.REJECTED, reason)
        case AccessStatus.NOT_SHAREABLE:
            return SliceOutcome(
                OutcomeKind.UNUSABLE, f"{region} is not in memory that can be mapped"
            )
        case AccessStatus.FILE_FAILED:
            return SliceOutcome(
                OutcomeKind.REJECTED, f"{where} of {region}, a file: {os.strerror(detail)}"
            )
        case AccessStatus.DEVICE_FAILED:
            reason = f"{where} of {region}, in device memory: the driver says error {detail}"
            return SliceOutcome(OutcomeKind.REJECTED, reason)
        case AccessStatus.FILE_SHRUNK:
            reason = f"{where} of {region}, a file that got shorter: it has {detail} bytes now"
            return SliceOutcome(OutcomeKind.REJECTED, reason)
