"""Remember connections that were given up in the middle of a write, see `tcp_sessions`."""

import itertools
import secrets
import threading
from collections import OrderedDict

from halfmoon_transfer.backends.tcp.tcp_frames import SESSION_BYTES
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor

#: Peers remembered; writes to the peer that is forgotten have long ended.
_MAX_PEERS = 4096


class AbandonedConnections:
    """The numbers of one engine's connections, by peer. Safe from any thread."""

    def __init__(self) -> None:
        self.session = secrets.token_bytes(SESSION_BYTES)
        self._numbers = itertools.count(1)
        #: By segment: the generation of the peer, and the numbers of the connections.
        self._abandoned: OrderedDict[str, tuple[int, set[int]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def any(self) -> bool:
        """Return whether there are any for any peer; quicker than `of`."""
        return bool(self._abandoned)

    def next_number(self) -> int:
        """Return the number of a new connection."""
        return next(self._numbers)

    def add(self, peer: SegmentDescriptor, number: int) -> None:
        """Remember a connection that was given up."""
        with self._lock:
            generation, numbers = self._abandoned.get(peer.name, (peer.generation, set()))
            # A restarted segment has none of the earlier start's connections.
            numbers = {*numbers, number} if generation == peer.generation else {number}
            self._abandoned[peer.name] = (peer.generation, numbers)
            if len(self._abandoned) > _MAX_PEERS:
                self._abandoned.popitem(last=False)

    def of(self, peer: SegmentDescriptor) -> tuple[int, ...]:
        """Return the connections that this peer must end before the next write to it."""
        with self._lock:
            generation, numbers = self._abandoned.get(peer.name, (0, set[int]()))
            return tuple(sorted(numbers)) if generation == peer.generation else ()

    def settle(self, peer: SegmentDescriptor, ended: tuple[int, ...]) -> None:
        """Forget connections that the peer has ended."""
        with self._lock:
            generation, numbers = self._abandoned.get(peer.name, (0, set[int]()))
            if generation == peer.generation and ended:
                left = numbers.difference(ended)
                if left:
                    self._abandoned[peer.name] = (generation, left)
                else:
                    del self._abandoned[peer.name]
