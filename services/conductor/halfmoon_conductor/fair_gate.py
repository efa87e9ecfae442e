"""Let so many tasks at once through a gate, tenants in turn."""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from halfmoon_scheduling.fair_queueing import FairShares, FairTag


class FairGate:
    """A semaphore whose waiters go by their tenants' shares (`fair_queueing`), then by arrival."""

    def __init__(self, n_places: int, *, credit: float) -> None:
        """Create a gate.

        Args:
            n_places: tasks inside at once.
            credit: see `FairShares`.
        """
        self._n_free = n_places
        self._shares = FairShares(credit)
        self._n_arrived = 0
        #: Fair finish, count of arrivals, tag, and what wakes the waiter. Sorted.
        self._waiting: list[tuple[float, int, FairTag, asyncio.Future[None]]] = []

    @property
    def is_full(self) -> bool:
        """True while the next task that comes has to wait."""
        return not self._n_free

    @asynccontextmanager
    async def place(self, tenant: str, work: float) -> AsyncIterator[None]:
        """Hold a place while the block runs; wait for one before.

        Args:
            tenant: name of the tenant; empty for none.
            work: of the task, more than 0, in a unit that all callers use.
        """
        tag = self._shares.tag(tenant, work)
        if self._n_free:
            self._n_free -= 1
        else:
            await self._wait(tag)
        self._shares.on_served(tag)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, tag: FairTag) -> None:
        """Wait until a place is handed over."""
        self._n_arrived += 1
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (tag.finish, self._n_arrived, tag, woken)
        insort(self._waiting, entry)
        try:
            await woken
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not woken.cancelled():
                self._leave()  # the place came at the same moment
            raise

    def _leave(self) -> None:
        """Hand the place to the first waiter that is still there, or free it."""
        while self._waiting:
            woken = self._waiting.pop(0)[-1]
            if not woken.cancelled():
                woken.set_result(None)
                return
        self._n_free += 1
