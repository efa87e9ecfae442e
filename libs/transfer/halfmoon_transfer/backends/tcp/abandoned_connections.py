"""Connections that we gave up in the middle of a write; see `sessions` for why that matters."""

import itertools
import secrets
import threading
from collections import OrderedDict

from halfmoon_transfer.metadata.descriptor import SegmentDescriptor

#: Peers remembered; of one that was not heard of for so long nothing is under way.
_MAX_PEERS = 4096


class AbandonedConnections:
    """One engine's, with the numbers of its connections. Safe from any thread."""

    def __init__(self) -> None:
        self.session = secrets.token_bytes(16)
        self._numbers = itertools.count(1)
        #: By segment: the start that the connections led to, and their numbers.
        self._given_up: OrderedDict[str, tuple[int, set[int]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def any(self) -> bool:
        """Whether there are any; quicker than asking for a peer's."""
        return bool(self._given_up)

    def next_number(self) -> int:
        """For a new connection."""
        return next(self._numbers)

    def add(self, peer: SegmentDescriptor, number: int) -> None:
        """This one was given up."""
        with self._lock:
            generation, numbers = self._given_up.get(peer.name, (peer.generation, set()))
            # Another start of the segment has none of the earlier one's connections.
            numbers = {*numbers, number} if generation == peer.generation else {number}
            self._given_up[peer.name] = (peer.generation, numbers)
            if len(self._given_up) > _MAX_PEERS:
                self._given_up.popitem(last=False)

    def of(self, peer: SegmentDescriptor) -> tuple[int, ...]:
        """What this peer must end before anything else is sent to it."""
        with self._lock:
            generation, numbers = self._given_up.get(peer.name, (0, set[int]()))
            return tuple(sorted(numbers)) if generation == peer.generation else ()

    def settle(self, peer: SegmentDescriptor, ended: tuple[int, ...]) -> None:
        """The peer has ended these."""
        with self._lock:
            generation, numbers = self._given_up.get(peer.name, (0, set[int]()))
            if generation == peer.generation and ended:
                left = numbers.difference(ended)
                if left:
                    self._given_up[peer.name] = (generation, left)
                else:
                    del self._given_up[peer.name]
