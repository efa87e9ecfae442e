"""One rail of one link, at the initiator: a queue pair, its completions, what is in flight.

    prepare -> (the owner's end) -> connect -> post, collect, post, … -> broken -> prepare …

Used by one thread at a time.
"""

import logging
import secrets
import time

from halfmoon_transfer.backends.rdma import verbs
from halfmoon_transfer.backends.rdma.device import Device
from halfmoon_transfer.backends.rdma.handshake import End
from halfmoon_transfer.backends.rdma.health import Pair
from halfmoon_transfer.backends.rdma.verbs import Completion, Status, VerbsError

_log = logging.getLogger(__name__)
#: Operations in flight: enough to keep a link busy, few enough to be soon redone elsewhere.
WINDOW = 16
_POLLED_AT_ONCE = 32
#: Without any completion for so long, a rail has failed, though retries should have ended well
#: before: reads on a software device whose own link went down just stay. The second one is for
#: a rail that has failed another link already.
_STALL_S = 3.0
_DOUBTFUL_STALL_S = 0.7
#: Flushed operations complete within microseconds; a driver that doesn't is cut off.
_DRAIN_S = 2.0
_DRAIN_PAUSE_S = 0.001


class Rail:
    """Our end of a rail."""

    def __init__(self, number: int, device: Device, pair: Pair) -> None:
        self.number = number
        self.device = device
        self.pair = pair
        #: Bytes of each operation that has not completed, by its number.
        self.in_flight: dict[int, int] = {}
        #: Whether it may be given operations; false from the first one that fails.
        self.connected = False
        #: The first failure since it was connected.
        self.failure: Completion | None = None
        #: When something completed last, or was posted with nothing before it in flight.
        self._moved_at = 0.0
        #: The queue pair was destroyed: no completion comes for what was in flight.
        self._is_cut = False
        self._queue = device.context.completion_queue(2 * WINDOW)
        try:
            self._pair = device.context.queue_pair(self._queue, WINDOW)
        except BaseException:
            self._queue.close()
            raise

    @property
    def fd(self) -> int:
        """Readable when something has completed since `arm`."""
        return self._queue.fd

    @property
    def n_bytes(self) -> int:
        """Bytes in flight."""
        return sum(self.in_flight.values())

    def prepare(self) -> End:
        """Our end, reset, for the owner to connect to.

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
            pass  # a reset leaves old completions where they are
        self._psn = secrets.randbelow(2**24)
        self._gid = self.device.gid()
        port = self.device.context.port()
        if not port.active:
            raise VerbsError(f"the port of RDMA device {self.device.name} is down")
        self._mtu = port.mtu
        reads = self.device.context.max_reads
        return End(self._gid.text, self._pair.number, self._psn, port.mtu, reads)

    def connect(self, end: End) -> None:
        """Connect to the owner's end.

        Raises:
            VerbsError: there is no way there.
        """
        connect(
            self._pair,
            end,
            psn=self._psn,
            gid_index=self._gid.index,
            mtu=self._mtu,
            reads=self.device.context.max_reads,
        )
        self.connected = True

    def has_room(self) -> bool:
        """Whether one more operation may be posted."""
        return self.connected and len(self.in_flight) < WINDOW

    def post(
        self,
        wr_id: int,
        *,
        write: bool,
        local: tuple[int, int, int],
        remote: tuple[int, int],
    ) -> bool:
        """One operation, see `QueuePair.post`; False if the rail would not take it."""
        try:
            self._pair.post(wr_id, write=write, local=local, remote=remote)
        except VerbsError:
            self.fail()
            return False
        if not self.in_flight:
            self._moved_at = time.monotonic()
        self.in_flight[wr_id] = local[1]
        return True

    def fail(self) -> None:
        """Give it up: what is in flight completes as flushed."""
        self.connected = False
        try:
            self._pair.fail()
        except VerbsError:
            self._cut()

    def collect(self) -> list[Completion]:
        """What has completed; after a failure the rail is not connected any more."""
        found: list[Completion] = []
        try:
            found = self._queue.poll(_POLLED_AT_ONCE)
        except VerbsError:
            self._cut()
        if self._is_cut:
            found = [Completion(each, Status.FLUSHED) for each in self.in_flight]
        fresh = [each for each in found if self.in_flight.pop(each.wr_id, None) is not None]
        if fresh:
            self._moved_at = time.monotonic()
        for each in fresh:
            if each.status != Status.SUCCESS and self.connected:
                self.failure = each
                self.fail()
        return fresh

    def arm(self) -> bool:
        """See `CompletionQueue.arm`."""
        return self._queue.arm()

    def take_event(self) -> None:
        """See `CompletionQueue.take_event`."""
        self._queue.take_event()

    def nudge(self, *, usable: bool) -> None:
        """End what stands still: there are devices that forget to complete an operation."""
        stall_s = _STALL_S if usable else _DOUBTFUL_STALL_S
        still_s = time.monotonic() - self._moved_at
        if self.in_flight and self.connected and still_s > stall_s:
            _log.warning("%s: %d operations stand still", self.pair, len(self.in_flight))
            self._moved_at = time.monotonic()
            self.fail()
        elif self.in_flight and not self.connected and still_s > _DRAIN_S:
            _log.warning("%s: %d operations were not flushed", self.pair, len(self.in_flight))
            self._cut()

    def drain(self) -> None:
        """End what is in flight; when this returns, the device leaves our memory alone."""
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
        """The hard way: without the queue pair nothing can be in flight."""
        self.connected = False
        if not self._is_cut:
            self._is_cut = True
            self._pair.close()

    def close(self) -> None:
        """Free it; what is in flight ends."""
        self._cut()
        self._queue.close()
        self.in_flight.clear()


def connect(
    pair: verbs.QueuePair, end: End, *, psn: int, gid_index: int, mtu: int, reads: int
) -> None:
    """Connect a queue pair to an end that came over the side channel."""
    far = verbs.RemoteEnd(end.gid, end.queue_pair, end.psn, end.mtu, end.max_reads)
    pair.connect(far, psn=psn, gid_index=gid_index, mtu=mtu, reads=reads)
