"""Slices of a region that is borrowed where it is, in its owner's own memory."""

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.shm.process_vm import (
    PartialCopy,
    ProcessGone,
    ProcessVmDenied,
    RemoteProcess,
)
from halfmoon_transfer.backends.shm.shm_peer import ShmPeer, ShmPeerGone
from halfmoon_transfer.backends.shm.shm_wire import ShmLentRegion
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus, access_refusal
from halfmoon_transfer.regions.byte_ops import checksum, flip_byte


class ProcessVmRegion:
    """A region for the length of one batch."""

    def __init__(self, peer: ShmPeer, process: RemoteProcess, lent: ShmLentRegion) -> None:
        self._peer = peer
        self._process = process
        self._lent = lent

    def move(self, errand: CarryRequest, index: int, each: Slice) -> SliceOutcome:
        """Have the kernel copy one slice, within the owner's bounds; checked if asked for.

        Raises:
            PeerGone: the owner's process has ended.
        """
        batch, lent = errand.batch, self._lent
        refused = access_refusal(
            each.remote_offset,
            each.length,
            write=batch.op == "write",
            n_bytes=lent.length,
            writable=lent.writable,
        )
        if refused is not None:
            return refusal_outcome(batch, each, refused.status, refused.detail)
        address = lent.address + each.remote_offset
        try:
            fine = (self._write if batch.op == "write" else self._read)(errand, index, address)
        except ProcessGone as gone:
            raise ShmPeerGone(str(gone)) from gone
        except ProcessVmDenied as error:
            self._peer.give_up_process(str(error))
            return SliceOutcome(OutcomeKind.UNUSABLE, str(error))
        except PartialCopy as torn:
            return SliceOutcome(OutcomeKind.LOST, str(torn))
        return APPLIED if fine else refusal_outcome(batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)

    def require_alive(self) -> None:
        """What was moved counts only if the process is still the same one.

        Raises:
            PeerGone: it has ended.
        """
        try:
            self._process.require_alive()
        except ProcessGone as gone:
            raise ShmPeerGone(str(gone)) from gone

    def _write(self, errand: CarryRequest, index: int, address: int) -> bool:
        data = errand.local[index]
        if index not in errand.damage:
            self._process.write(address, data)
        else:
            damaged = bytearray(data)
            flip_byte(memoryview(damaged), errand.damage[index])
            self._process.write(address, damaged)
        return not errand.verify or self._holds(address, data)

    def _read(self, errand: CarryRequest, index: int, address: int) -> bool:
        data = errand.local[index]
        self._process.read(address, data)
        if index in errand.damage:
            flip_byte(data, errand.damage[index])
        return not errand.verify or self._holds(address, data)

    def _holds(self, address: int, data: memoryview) -> bool:
        """Whether these bytes are there."""
        found = memoryview(bytearray(len(data)))
        self._process.read(address, found)
        return checksum(found) == checksum(data)
