"""Let writes to landings that a cut has lost land later, as bytes on their way over TCP do.

A connection that was given up in the middle of a write may still be read by its peer. A later
connection of the same process ends it first, and so does a worker that settles its writes.
"""

import asyncio
import random

from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop
from halfmoon_transfer.backends.backend_interface import Backend, CarryRequest
from halfmoon_transfer.threads.stop_signal import StopSignal

#: Seconds after which they land.
_LATE_S = (0.05, 4.0)


class LateWrites:
    """The writes of one process that may still land, by their peer."""

    def __init__(self, loop: VirtualLoop, dice: random.Random) -> None:
        """Have none.

        Args:
            loop: of the run; what is on its way lands also after its process has died.
            dice: draw when they land.
        """
        self._loop = loop
        self._dice = dice
        self._under_way: dict[str, list[asyncio.TimerHandle]] = {}

    def on_cut(self, request: CarryRequest, backend: Backend) -> None:
        """Let a write that was cut off land later, with the bytes of this moment."""
        name = request.peer.name
        is_landing = name.startswith("decode")
        if request.batch.op != "write" or not is_landing:
            return
        late = CarryRequest(
            request.batch,
            request.peer,
            tuple(memoryview(bytes(view)) for view in request.local),
            StopSignal(float("inf"), self._loop.time),
        )
        handle = self._loop.call_later(
            self._dice.uniform(*_LATE_S), backend.carry, late, context=self._loop.outside.context
        )
        self._under_way.setdefault(name, []).append(handle)

    def any_to(self, peer: str) -> bool:
        """Return whether a write may still land at this peer."""
        now = self._loop.time()
        return any(
            handle.when() > now and not handle.cancelled()
            for handle in self._under_way.get(peer, ())
        )

    def end(self, peer: str) -> None:
        """Let no write land at this peer any more that is on its way now."""
        for handle in self._under_way.pop(peer, ()):
            handle.cancel()
