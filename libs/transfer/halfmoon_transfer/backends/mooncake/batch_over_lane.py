"""Carry one batch over one connection: find addresses, group requests, report outcomes.

Slices that touch are moved by one request. Injected damage is not applied here: the protocol
has no checksum that could detect it.
"""

import struct
from collections.abc import Iterator, Sequence

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_lane import AddressRefused, MooncakeLane
from halfmoon_transfer.backends.mooncake.mooncake_peers import is_halfmoon
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus

#: Limit of bytes in one request, when slices touch.
_RUN_BYTES = 4 * 1024 * 1024
_ADDRESS = struct.Struct("<QQ")


def foreign_key(address: int, length: int) -> bytes:
    """Encode address and length as the key of a foreign region; Mooncake has no other key."""
    return _ADDRESS.pack(address, length)


def move_batch(
    lane: MooncakeLane, errand: CarryRequest, outcomes: list[SliceOutcome | None], *, trusted: bool
) -> bool:
    """Move the slices without an outcome; return False when the connection is used up.

    Args:
        lane: a connection to the peer.
        errand: the batch.
        outcomes: one entry per slice, filled in as slices are done.
        trusted: True if the lane's buffers of a Halfmoon engine were read just now.

    Raises:
        FrameError, OSError: the connection broke; slices without an outcome are lost.
    """
    ours = is_halfmoon(errand.peer)
    addresses: dict[int, int] = {}
    for index, each in enumerate(errand.batch.slices):
        if outcomes[index] is not None:
            continue
        found = _find_buffer(lane, errand, each) if ours else _foreign_address(each)
        if isinstance(found, int):
            addresses[index] = found
        elif trusted:
            outcomes[index] = found
        else:
            # The region may be newer than the buffers that this connection knows.
            return False
    for run in _runs(addresses, errand):
        if errand.stop.stopped:
            return False
        local = [errand.local[index] for index in run]
        try:
            if errand.batch.op == "write":
                lane.write(addresses[run[0]], local)
            else:
                lane.read(addresses[run[0]], local)
        except AddressRefused:
            if not ours:
                for index in run:
                    outcomes[index] = _refused(errand, errand.batch.slices[index])
            return False
        for index in run:
            outcomes[index] = APPLIED
    return True


def _find_buffer(lane: MooncakeLane, errand: CarryRequest, each: Slice) -> int | SliceOutcome:
    """Return a slice's address in a Halfmoon engine, or the outcome if access is refused."""
    buffer = lane.buffers.get(mooncake_records.hash_key(each.remote.key))
    if buffer is None or buffer.halfmoon is None:
        return refusal_outcome(errand.batch, each, AccessStatus.UNKNOWN_KEY, 0)
    if each.remote_offset + each.length > buffer.length:
        return refusal_outcome(errand.batch, each, AccessStatus.OUT_OF_BOUNDS, buffer.length)
    if errand.batch.op == "write" and buffer.halfmoon.read_only:
        return refusal_outcome(errand.batch, each, AccessStatus.READ_ONLY, 0)
    return buffer.addr + each.remote_offset


def _foreign_address(each: Slice) -> int | SliceOutcome:
    address, _ = _ADDRESS.unpack(each.remote.key)
    if address + each.remote_offset + each.length > 2**64:
        return SliceOutcome(
            OutcomeKind.REJECTED, f"{address:#x} and {each.remote_offset} is no address"
        )
    return int(address + each.remote_offset)


def _refused(errand: CarryRequest, each: Slice) -> SliceOutcome:
    address, length = _ADDRESS.unpack(each.remote.key)
    return SliceOutcome(
        OutcomeKind.REJECTED,
        f"{errand.batch.op} of {each.length} bytes at {address + each.remote_offset:#x}: segment "
        f"{errand.peer.name} has no buffer that holds them, such as the {length} bytes at "
        f"{address:#x} (any more)",
    )


def _runs(addresses: dict[int, int], errand: CarryRequest) -> Iterator[Sequence[int]]:
    """Yield runs of slices (by index) that touch at the peer; each run is one request."""
    run: list[int] = []
    n_bytes = 0
    previous: tuple[int, Region] | None = None
    for index, address in addresses.items():
        each = errand.batch.slices[index]
        if run and ((address, each.remote) != previous or n_bytes + each.length > _RUN_BYTES):
            yield run
            run, n_bytes = [], 0
        run.append(index)
        n_bytes += each.length
        previous = (address + each.length, each.remote)
    if run:
        yield run
