"""Keep the owner's end of one rail: a queue pair, and a slot for notifications.

The device answers reads and writes by itself. Only receives are posted: one completes when the
initiator has written a notification into the slot, with the length as the write's immediate. Once
the end is fenced, no packet for it lands until it is connected anew.
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

#: Depth of the send queue: the owner sends nothing.
_DEPTH = 1


class OwnerRail:
    """One end, and the notifications that arrived there."""

    def __init__(self, device: RdmaDevice) -> None:
        """Make an end on this device, not connected.

        Raises:
            VerbsError: the device failed.
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
            #: Frees everything, the latest first.
            self._made = undo.pop_all()
        self._offered = NotificationSlot(address, registered.rkey)
        self._local = address, SLOT_BYTES, registered.lkey

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a notification has arrived since `arm`."""
        return self._queue.fd

    def connect(self, end: RailEnd) -> RailConnected:
        """Connect (anew) to an initiator's end, ready for notifications.

        Raises:
            VerbsError: there is no route to the end.
        """
        device = self.device
        self.fence()
        gid, mtu, reads = device.gid(), device.context.port().mtu, device.context.max_reads
        psn = secrets.randbelow(2**24)
        connect_queue_pair(self._pair, end, psn=psn, gid_index=gid.index, mtu=mtu, reads=reads)
        with contextlib.suppress(VerbsError):  # a driver that keeps receives through a reset
            for _ in range(RECEIVES):
                self._pair.receive(self._local)
        return RailConnected(RailEnd(gid.text, self._pair.number, psn, mtu, reads), self._offered)

    def fence(self) -> None:
        """Drop all packets in flight, so that they never land.

        The queue pair is reset and not destroyed: with its link down that can take minutes.
        """
        self._pair.reset()

    def arm(self) -> bool:
        """Arm the queue, see `CompletionQueue.arm`."""
        return self._queue.arm()

    def take_event(self) -> None:
        """Take an event, see `CompletionQueue.take_event`."""
        self._queue.take_event()

    def arrived(self) -> list[bytes]:
        """Return the notifications that arrived since the last call, and post new receives.

        Raises:
            HandshakeError: the initiator announced an impossible length.
            VerbsError: the device failed.
        """
        bodies: list[bytes] = []
        for each in self._queue.poll(RECEIVES):
            if each.status != CompletionStatus.SUCCESS:
                continue  # the connection broke; its initiator notices by itself
            if not 0 < each.immediate <= SLOT_BYTES:
                raise HandshakeError(f"a notice of {each.immediate} bytes; a slot has {SLOT_BYTES}")
            bodies.append(self._slot[: each.immediate].tobytes())
            self._pair.receive(self._local)
        return bodies

    def close(self) -> None:
        """Free the end: peers reach our memory through it no more."""
        self._made.close()
