"""One batch over one connection: which addresses, in which requests, with which outcomes.

Slices that touch are moved by one request. Damage that `faults` asks for is not done here:
without a checksum nobody would notice.
"""

import struct
from collections.abc import Iterator, Sequence

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_lane import AddressRefused, MooncakeLane
from halfmoon_transfer.backends.mooncake.mooncake_peers import is_halfmoon
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.region_table import AccessStatus

#: Bytes moved by one request at the most, when slices touch.
_RUN_BYTES = 4 * 1024 * 1024
_ADDRESS = struct.Struct("<QQ")


def foreign_key(address: int, length: int) -> bytes:
    """The key of a region in a foreign segment: Mooncake has none but the address."""
    return _ADDRESS.pack(address, length)


def move_batch(
    lane: MooncakeLane, errand: CarryRequest, outcomes: list[SliceOutcome | None], *, trusted: bool
) -> bool:
    """Move what has no outcome yet; False when the connection is of no more use.

    Args:
        lane: a connection to the peer.
        errand: the batch.
        outcomes: filled in as slices are done.
        trusted: whether what the lane knows of our own engine's buffers was just asked.

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
            # It may be a new region; what this connection knows is from an earlier time.
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
    """Where a slice lies in one of our own engines, or why it may not be accessed."""
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
    """Indices of slices that touch at the far side, in runs of one request each."""
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
