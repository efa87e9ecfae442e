"""Read a cached prefix layer by layer: from one replica, or from the next if it fails.

    leased ──▶ all layers asked for ──▶ layer 0 here ──▶ … ──▶ all here
      ▲                │
      └─ the next ◀────┴── an error, or no layer for `patience_s`
         replica

Layers that are here stay, and may have been computed with. So in the middle another replica
takes over only if it holds the very same bytes, by their checksums: two workers that computed
a block each may differ in its last bits. Before the first layer is here any replica will do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from halfmoon_transfer.interface import Cancelled, Report, TimedOut, Transfer, TransferError
from halfmoon_transfer.threads.future_await import await_future

#: Lets another replica take over after an error, with so many layers here; False: none can.
ReplicaFailover = Callable[[TransferError, int], Awaitable[bool]]


class PrefixFetch:
    """Read the layers of one prefix, in an event loop; they may be awaited in any thread."""

    def __init__(
        self,
        n_layers: int,
        submit: Callable[[int], Transfer],
        take_over: ReplicaFailover,
        patience_s: float,
    ) -> None:
        """Start reading.

        Args:
            n_layers: of the model.
            submit: starts to read one layer from the present replica.
            take_over: makes another replica the present one.
            patience_s: seconds to wait for the next layer.
        """
        self._submit = submit
        self._take_over = take_over
        self._patience_s = patience_s
        self._n_here = 0
        self._cancelled = False
        self.layers = [LayerFetch(self.cancel) for _ in range(n_layers)]
        self._task = asyncio.create_task(self._read_on())
        self._task.add_done_callback(self._on_end)

    def cancel(self) -> None:
        """End the layers that are not here, once nothing writes to their pages any more."""
        if not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    async def _read_on(self) -> None:
        while True:
            try:
                await self._read_rest()
            except TransferError as error:
                if not await self._take_over(error, self._n_here):
                    raise
            else:
                return

    async def _read_rest(self) -> None:
        """Read what is not here from the present replica."""
        transfers: list[Transfer] = []
        try:
            for layer in range(self._n_here, len(self.layers)):
                transfers.append(self._submit(layer))
                await asyncio.sleep(0)  # the forward pass may begin before all layers are planned
            for transfer in transfers:
                async with asyncio.timeout(self._patience_s):
                    report = await transfer
                self.layers[self._n_here].future.set_result(report)
                self._n_here += 1
        except TimeoutError:
            raise TimedOut(f"no layer came for {self._patience_s} s") from None
        finally:
            await cancel_and_wait(transfers)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        for layer in self.layers[self._n_here :]:
            layer.future.set_exception(error or Cancelled("the prefix is not wanted any more"))


class LayerFetch(Transfer):
    """One layer from any replica: what the forward pass waits for."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self.future: Future[Report] = Future()

    def done(self) -> bool:
        """See `Transfer.done`."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> Report:
        """See `Transfer.result`."""
        try:
            return self.future.result(timeout_s)
        except FutureTimeout:
            raise TimedOut(f"not here after {timeout_s} s of waiting; it goes on") from None

    def cancel(self) -> None:
        """See `Transfer.cancel`: ends all layers. Not from another thread than the loop's."""
        self._cancel()

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """See `Transfer.add_done_callback`."""
        self.future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, Report]:
        """See `Transfer.__await__`."""
        return await_future(self.future)


async def cancel_and_wait(transfers: Sequence[Transfer]) -> None:
    """Stop what is under way and wait until it is over."""
    for transfer in transfers:
        transfer.cancel()
    for transfer in transfers:
        with suppress(Exception):  # it is over, which is all that matters here
            await transfer
