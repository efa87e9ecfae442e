"""What a kvstore says, in the order in which it became true: answers and KV events.

Several tasks change what is stored. Each puts what is to be said here in the same step in which
it changes something, and then sends, or leaves that to whoever is sending already: no event
overtakes another.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon_protocol.kv_events import KvEvent
from halfmoon_protocol.messages import Message
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable, Port

#: KV events of one publication at the most, far below what a message may hold.
_MAX_EVENTS = 512


@dataclass(frozen=True)
class _Answer:
    peer: PeerId
    message: Message


class Outbox:
    """Answers and events of one port."""

    def __init__(self, port: Port, lost: Callable[[PeerId], None]) -> None:
        """`lost` is called for a caller that can't be answered any more."""
        self._port = port
        self._lost = lost
        self._waiting: deque[_Answer | list[KvEvent]] = deque()
        self._sending = False
        #: Number of the last KV event published; -1 before the first.
        self.sequence = -1

    def answer(self, peer: PeerId, message: Message) -> None:
        """Say this to one caller."""
        self._waiting.append(_Answer(peer, message))

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Publish these."""
        for event in events:
            last = self._waiting[-1] if self._waiting else None
            if isinstance(last, list) and len(last) < _MAX_EVENTS:
                last.append(event)
            else:
                self._waiting.append([event])

    async def send(self) -> None:
        """Say all that waits, unless another task is at it.

        Raises:
            PeerUnreachable: the port is closed.
        """
        if self._sending:
            return
        self._sending = True
        try:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, list):
                    self.sequence = await self._port.publish_kv(item)
                    continue
                try:
                    await self._port.send(item.peer, item.message)
                except PeerUnreachable:
                    self._lost(item.peer)
        finally:
            self._sending = False
