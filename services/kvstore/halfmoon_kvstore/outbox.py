"""Send a kvstore's answers and KV events in the order in which they became true.

Several tasks change the stored blocks. In the same step as a change, a task queues its answers and
events here. Then it sends them, unless another task is sending already. So no event overtakes
another.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon_protocol.kv_events import KvEvent
from halfmoon_protocol.messages import Message
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable, Port

#: Most KV events of one publication, far below the limit of a message.
_MAX_EVENTS = 512


@dataclass(frozen=True)
class _Answer:
    peer: PeerId
    message: Message


class Outbox:
    """Queue and send the answers and events of one port."""

    def __init__(self, port: Port, lost: Callable[[PeerId], None]) -> None:
        """Use this port; `lost` is called for a caller that can't be reached any more."""
        self._port = port
        self._lost = lost
        self._waiting: deque[_Answer | list[KvEvent]] = deque()
        self._sending = False
        #: Number of the last KV event published; -1 before the first.
        self.sequence = -1

    def answer(self, peer: PeerId, message: Message) -> None:
        """Queue an answer to one caller."""
        self._waiting.append(_Answer(peer, message))

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue KV events to publish."""
        for event in events:
            last = self._waiting[-1] if self._waiting else None
            if isinstance(last, list) and len(last) < _MAX_EVENTS:
                last.append(event)
            else:
                self._waiting.append([event])

    async def send(self) -> None:
        """Send all queued answers and events, unless another task is sending.

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
