"""Post operations on one rail of one link, and collect their completions: the initiator.

    prepare -> (the owner's end) -> connect -> post, collect, post, … -> broken -> prepare …

Used by one thread at a time.
"""

import logging
import secrets
import time
from collections.abc import Sequence

from halfmoon_transfer.backends.rdma import verbs
from halfmoon_transfer.backends.rdma.rail_health import RailEndpoints
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import NotificationSlot, RailEnd
from halfmoon_transfer.backends.rdma.rdma_memory import NotificationBuffer
from halfmoon_transfer.backends.rdma.verbs import (
    CompletionStatus,
    RdmaOperation,
    VerbsError,
    WorkCompletion,
)

_log = logging.getLogger(__name__)
#: Operations and bytes in flight: enough to keep a link busy, few enough to be redone quickly on
#: another rail. One operation may have any length.
WINDOW = 64
WINDOW_BYTES = 4 * 1024 * 1024
#: The last operation of a run reports its success, and one per so many bytes.
_REPORTED_BYTES = 256 * 1024
_POLLED_AT_ONCE = 32
#: Without a completion for so long, a rail has failed. Retries should have ended well before, but
#: reads on a software device whose own link went down never end. The second one is for a rail that
#: has failed another link already.
_STALL_S = 3.0
_DOUBTFUL_STALL_S = 0.7
#: Without a completion for so long, the state of its port is checked.
_DOUBT_S = 0.2
#: Time limit of flushing, which takes microseconds; then the queue pair is destroyed.
_DRAIN_S = 2.0
_DRAIN_PAUSE_S = 0.001


class Rail:
    """The initiator's end of a rail."""

    def __init__(self, number: int, device: RdmaDevice, pair: RailEndpoints) -> None:
        self.number = number
        self.device = device
        self.pair = pair
        #: Bytes of each operation in flight, by its number, in the order of posting.
        self.in_flight: dict[int, int] = {}
        #: Their sum.
        self.n_bytes = 0
        #: Whether operations may be posted; False from the first one that fails.
        self.connected = False
        #: The first failure since it was connected.
        self.failure: WorkCompletion | None = None
        #: Time of the last completion, or of the first post to an idle rail.
        self._moved_at = 0.0
        #: The queue pair was destroyed: operations in flight never complete.
        self._is_cut = False
        #: The owner's slot for notifications, and our buffer for them, made when first needed.
        self._slot: NotificationSlot | None = None
        self._desk: NotificationBuffer | None = None
        self._queue = device.context.completion_queue(2 * WINDOW)
        try:
            self._pair = device.context.queue_pair(self._queue, WINDOW)
        except BaseException:
            self._queue.close()
            raise

    @property
    def fd(self) -> int:
        """Descriptor that is readable when an operation has completed since `arm`."""
        return self._queue.fd

    def prepare(self) -> RailEnd:
        """Reset our end and return it, for the owner to connect to.

        Raises:
            VerbsError: the device can't.
        """
        assert not self.in_flight
        self.connected = False
        self.failure = None
        if self._is_cut:
            self._pair = self.device.context.queue_pair(self._queue, WINDOW)
            self._is_cut = False
        self._pair.reset()
        while self._queue.poll(_POLLED_AT_ONCE):
            pass  # a reset leaves old completions in the queue
        self._psn = secrets.randbelow(2**24)
        self._gid = self.device.gid()
        port = self.device.context.port()
        if not port.active:
            raise VerbsError(f"the port of RDMA device {self.device.name} is down")
        self._mtu = port.mtu
        reads = self.device.context.max_reads
        return RailEnd(self._gid.text, self._pair.number, self._psn, port.mtu, reads)

    def connect(self, end: RailEnd, slot: NotificationSlot) -> None:
        """Connect to the owner's end, which takes notifications in this slot.

        Raises:
            VerbsError: there is no route to the end.
        """
        connect_queue_pair(
            self._pair,
            end,
            psn=self._psn,
            gid_index=self._gid.index,
            mtu=self._mtu,
            reads=self.device.context.max_reads,
        )
        self._slot = slot
        self.connected = True

    def has_room(self, n_more: int = 0, n_more_bytes: int = 0) -> bool:
        """Return whether one more operation may be posted, after so many others."""
        return (
            self.connected
            and len(self.in_flight) + n_more < WINDOW
            and self.n_bytes + n_more_bytes < WINDOW_BYTES
        )

    def post(self, run: Sequence[RdmaOperation], *, write: bool) -> int:
        """Post operations and return how many were taken; if not all, the rail has failed."""
        n_taken = self._pair.post(run, _reports(run), write=write)
        if not self.in_flight:
            self._moved_at = time.monotonic()
        for each in run[:n_taken]:
            self.in_flight[each.wr_id] = each.length
            self.n_bytes += each.length
        if n_taken < len(run):
            self.fail()
        return n_taken

    def announce(self, body: bytes) -> bool:
        """Write a notification into the owner's slot; return False if the rail has failed."""
        assert self.connected and not self.in_flight and self._slot is not None
        try:
            if self._desk is None:
                self._desk = NotificationBuffer(self.device)
            address, lkey = self._desk.lay(body)
            slot = self._slot
            operation = RdmaOperation(0, address, len(body), lkey, slot.rkey, slot.address)
            self._pair.announce(operation, len(body))
        except VerbsError:
            self._cut()
            return False
        self._moved_at = time.monotonic()
        self.in_flight[0] = len(body)
        self.n_bytes = len(body)
        return True

    def fail(self) -> None:
        """Give the rail up: operations in flight complete as flushed."""
        self.connected = False
        try:
            self._pair.fail()
        except VerbsError:
            self._cut()

    def collect(self) -> list[WorkCompletion]:
        """Return what has completed; after a failure the rail is not connected any more."""
        found: list[WorkCompletion] = []
        try:
            found = self._queue.poll(_POLLED_AT_ONCE)
        except VerbsError:
            self._cut()
        if self._is_cut:
            found = [WorkCompletion(each, CompletionStatus.FLUSHED) for each in self.in_flight]
        fresh: list[WorkCompletion] = []
        for each in found:
            if each.wr_id in self.in_flight:
                fresh += self._up_to(each)
        if fresh:
            self._moved_at = time.monotonic()
        return fresh

    def _up_to(self, completion: WorkCompletion) -> list[WorkCompletion]:
        """Return a completion, preceded by those that it implies without a report."""
        ended: list[WorkCompletion] = []
        while True:
            wr_id = next(iter(self.in_flight))
            self.n_bytes -= self.in_flight.pop(wr_id)
            if wr_id == completion.wr_id:
                break
            ended.append(WorkCompletion(wr_id, CompletionStatus.SUCCESS))
        if completion.status != CompletionStatus.SUCCESS and self.connected:
            self.failure = completion
            self.fail()
        return [*ended, completion]

    def arm(self) -> bool:
        """Arm the queue, see `CompletionQueue.arm`."""
        return self._queue.arm()

    def take_event(self) -> None:
        """Take an event, see `CompletionQueue.take_event`."""
        self._queue.take_event()

    def nudge(self, *, usable: bool) -> None:
        """Fail a rail that stands still: some devices forget to complete an operation."""
        if not self.in_flight:
            return
        still_s = time.monotonic() - self._moved_at
        if still_s <= _DOUBT_S:
            return
        stall_s = _STALL_S if usable else _DOUBTFUL_STALL_S
        if self.connected and (still_s > stall_s or not self._is_port_up()):
            _log.warning("%s: %d operations stand still", self.pair, len(self.in_flight))
            self._moved_at = time.monotonic()
            self.fail()
        elif not self.connected and still_s > _DRAIN_S:
            _log.warning("%s: %d operations were not flushed", self.pair, len(self.in_flight))
            self._cut()

    def _is_port_up(self) -> bool:
        """Return whether the port is up; also False when its cable or switch is dead."""
        try:
            return self.device.context.port().active
        except VerbsError:
            return False

    def drain(self) -> None:
        """End operations in flight; afterwards the device accesses our memory no more."""
        if not self.in_flight:
            return
        self.fail()
        until = time.monotonic() + _DRAIN_S
        while self.in_flight:
            if not self.collect():
                if time.monotonic() > until:
                    self._cut()
                time.sleep(_DRAIN_PAUSE_S)

    def _cut(self) -> None:
        """Destroy the queue pair, so that nothing can be in flight."""
        self.connected = False
        if not self._is_cut:
            self._is_cut = True
            self._pair.close()

    def close(self) -> None:
        """Free the rail; operations in flight end."""
        self._cut()
        self._queue.close()
        if self._desk is not None:
            self._desk.close()
        self.in_flight.clear()
        self.n_bytes = 0


def _reports(run: Sequence[RdmaOperation]) -> list[bool]:
    """Choose the few operations that report their success."""
    chosen: list[bool] = []
    n_bytes = 0
    for each in run:
        n_bytes += each.length
        chosen.append(n_bytes >= _REPORTED_BYTES)
        if chosen[-1]:
            n_bytes = 0
    chosen[-1] = True
    return chosen


def connect_queue_pair(
    pair: verbs.QueuePair, end: RailEnd, *, psn: int, gid_index: int, mtu: int, reads: int
) -> None:
    """Connect a queue pair to an end that came over the side channel."""
    far = verbs.RemoteEnd(end.gid, end.queue_pair, end.psn, end.mtu, end.max_reads)
    pair.connect(far, psn=psn, gid_index=gid_index, mtu=mtu, reads=reads)
