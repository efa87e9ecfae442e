"""Define the contract of a backend: one path between this engine's regions and a peer's.

A backend is opened with its engine, listens if it needs to, and carries batches in threads of the
engine. It raises no errors of the network or the peer: every slice gets an outcome.
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
    """The engine that a backend belongs to, as far as backends need it."""

    name: str
    generation: int
    host_id: str
    bind: str
    port: int
    advertise: str | None
    #: Further addresses to listen at, each with the address that peers should dial for it.
    more: tuple[tuple[str, str | None], ...]
    #: Which NICs are near which memory; None: all are equally near.
    topology: Topology | None
    regions: RegionTable
    #: The devices whose memory is among the regions.
    devices: DeviceTable
    #: Receives the notifications of peers.
    notification_queue: NotificationQueue
    settings: TransferSettings


class CarryRequest(msgspec.Struct, frozen=True):
    """One batch, with all that is needed to carry it."""

    batch: Batch
    peer: SegmentDescriptor
    #: The local bytes of each slice: the source of a write, the destination of a read.
    local: tuple[memoryview, ...]
    stop: StopSignal
    #: Compare checksums even if no wire is crossed: the batch asks for it, or `fault_injection`.
    verify: bool = False
    #: By position in the batch: the byte to damage in flight. Only `fault_injection` sets it.
    damage: dict[int, int] = {}
    #: Called in place of carrying a part over one rail. Only `fault_injection` sets it.
    rail_hook: "RailHook | None" = None


#: Arguments: a rail's address, the part for it, and the function that would carry the part.
RailHook = Callable[
    [str, CarryRequest, Callable[[CarryRequest], Sequence[SliceOutcome]]], Sequence[SliceOutcome]
]


class BackendCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the contract that a backend fulfils; the conformance suite skips the others."""

    #: Reaches engines of other processes, not only those of its own.
    other_processes: bool
    #: Reaches regions in host memory, not only those in device memory.
    host_memory: bool
    #: Carries notifications.
    notifications: bool
    #: Gives views of regions that a peer allocated.
    views: bool
    #: The owner checks each access, so that grants hold; others move no bytes by a grant's key.
    checks_accesses: bool


class Backend(Protocol):
    """One path to peers. Methods are safe from any thread."""

    name: str
    capabilities: BackendCapabilities
    #: The preferred size of slices in bytes.
    slice_bytes: int

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints to publish for peers, by the name that they look for."""
        ...

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether this path may lead to a peer, judged by its descriptor alone."""
        ...

    def carry(self, request: CarryRequest, /) -> Sequence[SliceOutcome]:
        """Move a batch and return one outcome per slice, in order. Blocks.

        After it returns, the local bytes are neither read nor written any more.
        """
        ...

    def notify(self, request: CarryRequest, /) -> SliceOutcome:
        """Deliver the batch's notification into the peer's queue. Blocks.

        Returns `UNUSABLE` if this path carries none; the next path is taken then.
        """
        ...

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return all bytes of a peer's region, read-only and without a copy; None if it can't."""
        ...

    def revoke(self, key: bytes) -> None:
        """Tell peers that hold one of our regions that it was removed."""
        ...

    def evict(self, key: bytes) -> None:
        """Cut off the accesses to a region that go on; their peers may try again."""
        ...

    def forget(self, segment: str) -> None:
        """Close connections to this peer and release its memory."""
        ...

    def gauges(self) -> "BackendGauges":
        """Return the number of open connections and mappings."""
        ...

    def close(self) -> None:
        """Stop listening and close everything; no batch is being carried any more."""
        ...


@runtime_checkable
class SupportsInlineCopy(Protocol):
    """A backend that carries some batches by a mere copy of memory, without waiting."""

    def can_copy_inline(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Return whether carrying this batch now takes no longer than copying its bytes."""
        ...


@runtime_checkable
class SupportsSettling(Protocol):
    """A backend whose writes may still arrive after their transfer has been given up."""

    def is_unsettled(self, peer: SegmentDescriptor) -> bool:
        """Return whether bytes of a write that was given up may still land at this peer."""
        ...

    def settle(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """Return when no byte of a write that was given up before can land any more.

        Raises:
            TransferError: the peer does not confirm it in time.
        """
        ...


@runtime_checkable
class SupportsHangUp(Protocol):
    """A backend whose connections can be cut, with all that peers have on their way."""

    def hang_up(self) -> None:
        """Cut each connection by which peers reach our regions; they may open others."""
        ...

    def is_quiet(self) -> bool:
        """Return whether no access goes on by a connection that was cut."""
        ...


@runtime_checkable
class SupportsFastPath(Protocol):
    """A backend that can move a few pieces over a connection that is open and idle."""

    def try_fast_path(
        self,
        peer: SegmentDescriptor,
        op: Op,
        pieces: Sequence[Piece],
        local: tuple[memoryview, ...],
        deadline: float,
    ) -> bool:
        """Move a few pieces over an idle connection; return whether all of them are applied.

        If not, no connection was idle, or only some pieces are applied. All may be retried at once.
        After it returns, the local bytes are neither read nor written any more.

        Args:
            peer: the owner of the remote regions.
            op: the direction of the bytes.
            pieces: of at least one byte each, and within the bounds of their regions.
            local: the local bytes of each piece.
            deadline: end of the attempt, on the monotonic clock.
        """
        ...


class BackendGauges(msgspec.Struct, frozen=True):
    """Numbers of what a backend holds now, and of malformed input since it was opened."""

    n_connections: int = 0
    n_mappings: int = 0
    n_malformed: int = 0


def same_outcome_for_all(batch: Batch, kind: OutcomeKind, reason: str) -> list[SliceOutcome]:
    """Return the same outcome for every slice of a batch."""
    return [SliceOutcome(kind, reason)] * len(batch.slices)


def refusal_outcome(batch: Batch, each: Slice, status: AccessStatus, detail: int) -> SliceOutcome:
    """Translate an owner's refusal of a slice into its outcome, with a text for users."""
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
        case AccessStatus.NOT_GRANTED:
            reason = f"{where} of {region}: the key grants other ranges, or the other direction"
            return SliceOutcome(OutcomeKind.REJECTED, reason)
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
                f"{where}: segment {batch.peer.segment} has {detail} unread notifications, "
                "the limit; it must read them with `notifications`"
            )
            return SliceOutcome(OutcomeKind.REJECTED, reason)
        case AccessStatus.NOT_SHAREABLE:
            return SliceOutcome(
                OutcomeKind.UNUSABLE, f"{region} is not in memory that can be mapped"
            )
        case AccessStatus.FILE_FAILED:
            return SliceOutcome(
                OutcomeKind.REJECTED, f"{where} of {region}, a file: {_errno_text(detail)}"
            )
        case AccessStatus.DEVICE_FAILED:
            reason = f"{where} of {region}, in device memory: the driver says error {detail}"
            return SliceOutcome(OutcomeKind.REJECTED, reason)
        case AccessStatus.FILE_SHRUNK:
            reason = f"{where} of {region}, a file that got shorter: it has {detail} bytes now"
            return SliceOutcome(OutcomeKind.REJECTED, reason)


def _errno_text(number: int) -> str:
    """Return the text of an errno that a peer sent, which may be any number of 64 bits."""
    return os.strerror(number) if number < 2**31 else f"unknown error {number}"
