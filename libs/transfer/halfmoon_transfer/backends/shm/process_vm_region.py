"""Copy slices of a borrowed region, in its owner's own memory."""

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.shm.process_vm import (
    PartialCopy,
    ProcessGone,
    ProcessVmDenied,
    RemoteProcess,
)
from halfmoon_transfer.backends.shm.shm_peer import ShmPeer
from halfmoon_transfer.backends.shm.shm_wire import ShmLentRegion
from halfmoon_transfer.backends.unix_peer import UnixPeerGone
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus, access_refusal
from halfmoon_transfer.regions.byte_ops import checksum, flip_byte

#: Bytes that are read back at a time.
_COMPARED_BYTES = 1024 * 1024


class ProcessVmRegion:
    """A region that is borrowed for one batch."""

    def __init__(self, peer: ShmPeer, process: RemoteProcess, lent: ShmLentRegion) -> None:
        self._peer = peer
        self._process = process
        self._lent = lent

    def copy(self, request: CarryRequest, index: int, each: Slice) -> SliceOutcome:
        """Have the kernel copy one slice within the owner's bounds, and verify it on request.

        Raises:
            UnixPeerGone: the owner's process has ended.
        """
        batch, lent = request.batch, self._lent
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
        copy = self._write if batch.op == "write" else self._read
        try:
            intact = copy(request, index, address)
        except ProcessGone as gone:
            raise UnixPeerGone(str(gone)) from gone
        except ProcessVmDenied as error:
            self._peer.give_up_process(str(error))
            return SliceOutcome(OutcomeKind.UNUSABLE, str(error))
        except PartialCopy as error:
            return SliceOutcome(OutcomeKind.LOST, str(error))
        if not intact:
            return refusal_outcome(batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)
        return APPLIED

    def require_alive(self) -> None:
        """Check that the process is still the same one; only then do its copies count.

        Raises:
            UnixPeerGone: it has ended.
        """
        try:
            self._process.require_alive()
        except ProcessGone as gone:
            raise UnixPeerGone(str(gone)) from gone

    def _write(self, request: CarryRequest, index: int, address: int) -> bool:
        data = request.local[index]
        if index not in request.damage:
            self._process.write(address, data)
        else:
            damaged = bytearray(data)
            flip_byte(memoryview(damaged), request.damage[index])
            self._process.write(address, damaged)
        return not request.verify or self._matches(address, data)

    def _read(self, request: CarryRequest, index: int, address: int) -> bool:
        data = request.local[index]
        self._process.read(address, data)
        if index in request.damage:
            flip_byte(data, request.damage[index])
        return not request.verify or self._matches(address, data)

    def _matches(self, address: int, data: memoryview) -> bool:
        """Return whether the owner's memory holds these bytes."""
        found = memoryview(bytearray(min(len(data), _COMPARED_BYTES)))
        for start in range(0, len(data), _COMPARED_BYTES):
            part = data[start : start + _COMPARED_BYTES]
            self._process.read(address + start, found[: len(part)])
            if checksum(found[: len(part)]) != checksum(part):
                return False
        return True
