"""Sends to slow callers: they wait, one after the other, until the caller's queue has room.

Whoever is slower than the worker that answers it slows that worker down, rather than missing
what it said. That it reads at all is for heartbeats to find out, which lie behind what it
does not read: a caller that takes nothing is gone within their limit, and both sides know.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_runtime.channels.network import PeerId

#: How often it is tried whether a full queue has room.
_RETRY_S = 0.002


@dataclass
class _Turn:
    """Sends that wait for one caller."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_waiting: int = 0


class SendBackpressure:
    """Sends of one port that wait, by caller."""

    def __init__(self) -> None:
        self._turns: dict[PeerId, _Turn] = {}

    async def send(self, peer: PeerId, offer: Callable[[], bool]) -> None:
        """Call `try_put` until it is true; calls for the same caller are served in order.

        Args:
            peer: who shall take it.
            offer: says whether the caller's queue took the message; what it raises ends this.
        """
        turn = self._turns.get(peer)
        if turn is None:
            if offer():
                return
            turn = self._turns[peer] = _Turn()
        turn.n_waiting += 1
        try:
            async with turn.lock:
                # libzmq does not tell when one caller of a ROUTER has room.
                while not offer():  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
        finally:
            turn.n_waiting -= 1
            if not turn.n_waiting:
                del self._turns[peer]
