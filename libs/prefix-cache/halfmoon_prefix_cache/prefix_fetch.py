"""Read a cached prefix layer by layer: from one replica, or from the next if it fails.

    leased ──▶ all groups asked for ──▶ layer 0 here ──▶ … ──▶ all here
      ▲                │
      └─ the next ◀────┴── an error, or no layer for `patience_s`
         replica

Layers that are here stay, and may have been computed with. So in the middle another replica
takes over only if it holds the very same bytes, by their checksums: two workers that computed
a block each may differ in its last bits. Before the first layer is here any replica will do.

A layer is announced in the thread that carried its last byte. The forward pass waits for it in
another thread, and the event loop may be busy with the reads of later layers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Lock

import msgspec

from halfmoon_transfer.interface import Cancelled, Report, TimedOut, Transfer, TransferError
from halfmoon_transfer.threads.future_await import await_future

#: Lets another replica take over after an error, with so many layers here; False: none can.
ReplicaFailover = Callable[[TransferError, int], Awaitable[bool]]


class PrefixFetch:
    """Read the layers of one prefix, in an event loop; they may be awaited in any thread."""

    def __init__(
        self,
        groups: Sequence[range],
        submit: Callable[[range], Transfer],
        take_over: ReplicaFailover,
        patience_s: float,
    ) -> None:
        """Start reading.

        Args:
            groups: of the model's layers, in order; the layers of a group are read together.
            submit: starts to read one group from the present replica.
            take_over: makes another replica the present one.
            patience_s: seconds to wait for the next layer.
        """
        self._groups = groups
        self._submit = submit
        self._take_over = take_over
        self._patience_s = patience_s
        self._cancelled = False
        self.layers = [LayerFetch(self.cancel) for _ in range(groups[-1].stop)]
        self._arrivals = LayerArrivals(self.layers)
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
                if not await self._take_over(error, self._arrivals.n_here):
                    raise
            else:
                return

    async def _read_rest(self) -> None:
        """Read what is not here from the present replica."""
        transfers: list[Transfer] = []
        try:
            n_here = self._arrivals.n_here  # whole groups
            for group in [group for group in self._groups if group.start >= n_here]:
                transfers.append(self._submit(group))
                self._arrivals.expect(group, transfers[-1])
                await asyncio.sleep(0)  # the forward pass may begin before all reads are planned
            for transfer in transfers:
                if not transfer.done():
                    async with asyncio.timeout(self._patience_s):
                        await transfer
                transfer.result(0)
        except BaseException as error:
            await cancel_and_wait(transfers)
            self._arrivals.expect_no_more()
            if isinstance(error, TimeoutError):
                raise TimedOut(f"no layer came for {self._patience_s} s") from None
            raise

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._arrivals.end(Cancelled("the prefix is not wanted any more"))
        elif error := task.exception():
            self._arrivals.end(error)


class LayerArrivals:
    """The layers that are here: the first so many, each announced once, in their order."""

    def __init__(self, layers: "Sequence[LayerFetch]") -> None:
        self._layers = layers
        self._lock = Lock()
        #: Layers that are announced; only `expect` begins what may change it.
        self.n_here = 0
        #: By their first layer: groups of the present replica that came before their turn.
        self._early: dict[int, tuple[range, Report]] = {}
        #: Replicas whose transfers are over. A late callback of theirs must announce nothing.
        self._n_over = 0

    def expect(self, group: range, transfer: Transfer) -> None:
        """Announce these layers once this transfer has brought them; never after a failure."""
        replica = self._n_over
        transfer.add_done_callback(lambda done: self._on_done(replica, group, done))

    def expect_no_more(self) -> None:
        """Leave the layers that are not announced yet to another replica."""
        with self._lock:
            self._n_over += 1
            self._early.clear()

    def end(self, error: BaseException) -> None:
        """End the layers that are not here with this error; nothing is announced any more."""
        self.expect_no_more()
        for layer in self._layers[self.n_here :]:
            layer.future.set_exception(error)

    def _on_done(self, replica: int, group: range, transfer: Transfer) -> None:
        """Announce a group, and those after it that came earlier; in any thread."""
        try:
            report = transfer.result(0)
        except TransferError:
            return  # `_read_rest` gets it from the transfer, and another replica may take over
        report = msgspec.structs.replace(report, n_bytes=report.n_bytes // len(group))
        with self._lock:
            if replica != self._n_over:
                return
            self._early[group.start] = group, report
            while (here := self._early.pop(self.n_here, None)) is not None:
                self._announce(*here)

    def _announce(self, group: range, report: Report) -> None:
        """Announce a group; under the lock, so that layers keep their order."""
        for layer in group:
            self._layers[layer].future.set_result(report)
        self.n_here = group.stop


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
    """Stop what is under way and wait until it is over.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile. All is over even then: what is
            moved in memory may not be given to others before.
    """
    for transfer in transfers:
        transfer.cancel()
    cancelled: asyncio.CancelledError | None = None
    for transfer in transfers:
        while not transfer.done():
            try:
                await transfer
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception:  # it is over, which is all that matters here
                break
    if cancelled is not None:
        raise cancelled
