"""Slices of a region that is borrowed where it is, in its owner's own memory."""

from halfmoon_transfer.backends.interface import Errand, refusal
from halfmoon_transfer.backends.shm.across import Gone, NotAllowed, Process, Torn
from halfmoon_transfer.backends.shm.peer import PeerGone, ShmPeer
from halfmoon_transfer.backends.shm.wire import Lent
from halfmoon_transfer.copying import checksum, damage
from halfmoon_transfer.plan import APPLIED, Fate, Outcome, Slice
from halfmoon_transfer.regions import Status


class Borrowed:
    """A region for the length of one batch."""

    def __init__(self, peer: ShmPeer, process: Process, lent: Lent) -> None:
        self._peer = peer
        self._process = process
        self._lent = lent

    def move(self, errand: Errand, index: int, each: Slice) -> Outcome:
        """Have the kernel copy one slice, within the owner's bounds; checked if asked for.

        Raises:
            PeerGone: the owner's process has ended.
        """
        batch, lent = errand.batch, self._lent
        if each.remote_offset + each.length > lent.length:
            return refusal(batch, each, Status.OUT_OF_BOUNDS, lent.length)
        if batch.op == "write" and not lent.writable:
            return refusal(batch, each, Status.READ_ONLY, 0)
        address = lent.address + each.remote_offset
        try:
            fine = (self._write if batch.op == "write" else self._read)(errand, index, address)
        except Gone as gone:
            raise PeerGone(str(gone)) from gone
        except NotAllowed as error:
            self._peer.give_up_process(str(error))
            return Outcome(Fate.UNUSABLE, str(error))
        except Torn as torn:
            return Outcome(Fate.LOST, str(torn))
        return APPLIED if fine else refusal(batch, each, Status.CHECKSUM_MISMATCH, 0)

    def require_alive(self) -> None:
        """What was moved counts only if the process is still the same one.

        Raises:
            PeerGone: it has ended.
        """
        try:
            self._process.require_alive()
        except Gone as gone:
            raise PeerGone(str(gone)) from gone

    def _write(self, errand: Errand, index: int, address: int) -> bool:
        data = errand.local[index]
        if index not in errand.damage:
            self._process.write(address, data)
        else:
            damaged = bytearray(data)
            damage(memoryview(damaged), errand.damage[index])
            self._process.write(address, damaged)
        return not errand.verify or self._holds(address, data)

    def _read(self, errand: Errand, index: int, address: int) -> bool:
        data = errand.local[index]
        self._process.read(address, data)
        if index in errand.damage:
            damage(data, errand.damage[index])
        return not errand.verify or self._holds(address, data)

    def _holds(self, address: int, data: memoryview) -> bool:
        """Whether these bytes are there."""
        found = memoryview(bytearray(len(data)))
        self._process.read(address, found)
        return checksum(found) == checksum(data)
