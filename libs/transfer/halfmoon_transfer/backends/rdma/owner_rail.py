"""The owner's end of one rail: a queue pair that answers by itself, and a slot for notices.

It posts nothing but receives, each of which completes when the initiator has written a notice
into the slot and says so with its write's immediate. Once it is fenced, no packet that was
meant for it lands, until it is connected anew.
"""

import contextlib
import secrets

import numpy as np

from halfmoon_transfer.backends.rdma.rail import connect_queue_pair
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    SLOT_BYTES,
    HandshakeError,
    NotificationSlot,
    RailConnected,
    RailEnd,
)
from halfmoon_transfer.backends.rdma.verbs import RECEIVES, CompletionStatus, VerbsError

#: It sends nothing.
_DEPTH = 1


class OwnerRail:
    """One end, and what has arrived there."""

    def __init__(self, device: RdmaDevice) -> None:
        """On this device, not connected.

        Raises:
            VerbsError: the device can't.
        """
        self.device = device
        self._slot = np.zeros(SLOT_BYTES, np.uint8)
        with contextlib.ExitStack() as undo:
            self._queue = device.context.completion_queue(2 * RECEIVES)
            undo.callback(self._queue.close)
            self._pair = device.context.queue_pair(self._queue, _DEPTH, extended=False)
            undo.callback(self._pair.close)
            address = int(self._slot.ctypes.data)
            registered = device.context.register(address, SLOT_BYTES, writable=True, remote=True)
            undo.callback(registered.close)
            #: Frees the latest first.
            self._made = undo.pop_all()
        self._offered = NotificationSlot(address, registered.rkey)
        self._local = address, SLOT_BYTES, registered.lkey

    @property
    def fd(self) -> int:
        """Readable when something has arrived since `arm`."""
        return self._queue.fd

    def connect(self, end: RailEnd) -> RailConnected:
        """Connect it (anew) to an initiator's end, ready for notices.

        Raises:
            VerbsError: there is no way there.
        """
        device = self.device
        self.fence()
        gid, mtu, reads = device.gid(), device.context.port().mtu, device.context.max_reads
        psn = secrets.randbelow(2**24)
        connect_queue_pair(self._pair, end, psn=psn, gid_index=gid.index, mtu=mtu, reads=reads)
        with contextlib.suppress(VerbsError):  # full: a driver that keeps them through a reset
            for _ in range(RECEIVES):
                self._pair.receive(self._local)
        return RailConnected(RailEnd(gid.text, self._pair.number, psn, mtu, reads), self._offered)

    def fence(self) -> None:
        """What is still on its way to it does not land.

        Not by destroying the queue pair: with its link down that can take minutes.
        """
        self._pair.reset()

    def arm(self) -> bool:
        """See `CompletionQueue.arm`."""
        return self._queue.arm()

    def take_event(self) -> None:
        """See `CompletionQueue.take_event`."""
        self._queue.take_event()

    def arrived(self) -> list[bytes]:
        """Notices that were announced since the last time, ready for as many more.

        Raises:
            HandshakeError: the initiator announced what can't be.
            VerbsError: the device failed.
        """
        bodies: list[bytes] = []
        for each in self._queue.poll(RECEIVES):
            if each.status != CompletionStatus.SUCCESS:
                continue  # the connection broke; its initiator finds out by itself
            if not 0 < each.immediate <= SLOT_BYTES:
                raise HandshakeError(f"a notice of {each.immediate} bytes; a slot has {SLOT_BYTES}")
            bodies.append(self._slot[: each.immediate].tobytes())
            self._pair.receive(self._local)
        return bodies

    def close(self) -> None:
        """Nobody reaches our memory through it any more."""
        self._made.close()
