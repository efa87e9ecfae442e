"""Make sends to a slow caller wait, in order, until the caller's queue has room.

A caller that is slower than its worker slows that worker down, rather than missing answers. A
caller that reads nothing is found by heartbeats, which queue behind the unread messages. It
counts as gone within their limit, and both sides know.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_runtime.channels.network import PeerId

#: Seconds between two attempts to queue a message for a caller whose queue is full.
_RETRY_S = 0.002


@dataclass
class _WaitingSends:
    """Queue of the sends that wait for one caller."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_waiting: int = 0


class SendBackpressure:
    """Hold back the sends of one port, by caller, while that caller's queue is full."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, _WaitingSends] = {}

    async def send(self, peer: PeerId, try_send: Callable[[], bool]) -> None:
        """Call `try_send` until it returns true; calls for one caller are served in order.

        Args:
            peer: the caller to send to.
            try_send: queues the message and returns whether there was room. Its errors are
                passed on.
        """
        sends = self._waiting.get(peer)
        if sends is None:
            if try_send():
                return
            sends = self._waiting[peer] = _WaitingSends()
        sends.n_waiting += 1
        try:
            async with sends.lock:
                # libzmq does not signal when one caller of a ROUTER has room.
                while not try_send():  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
        finally:
            sends.n_waiting -= 1
            if not sends.n_waiting:
                del self._waiting[peer]
