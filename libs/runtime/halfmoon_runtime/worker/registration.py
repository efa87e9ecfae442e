"""Put a worker into service: serve its port, expose its metrics, register it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.observability.metrics import MetricSnapshot, expose_metrics


class ServableWorker(Protocol):
    """Serve a port, and report metrics."""

    async def serve(self) -> None:
        """Answer until cancelled."""
        ...

    def metrics(self) -> MetricSnapshot:
        """Return the worker's metrics."""
        ...


@asynccontextmanager
async def registered_worker(
    worker: ServableWorker,
    membership: Membership,
    service: Service,
    *more: Callable[[], MetricSnapshot],
) -> AsyncIterator[None]:
    """Keep a worker in service for the length of a block.

    The worker serves before it is registered, and until it is deregistered.

    Args:
        worker: serves commands, and has metrics.
        membership: the worker's record in the metadata server.
        service: the worker's process.
        more: further metrics to expose.

    Raises:
        Superseded: a later start of this worker is registered.
    """
    async with AsyncExitStack() as stack:
        for read in (worker.metrics, membership.metrics, *more):
            stack.callback(expose_metrics(read))
        await stack.enter_async_context(service.running(worker.serve()))
        # Before it joins: a stop in the middle of that must not leave a record behind.
        stack.push_async_callback(membership.leave)
        await membership.join()
        await stack.enter_async_context(service.running(membership.keep_alive()))
        service.ready()
        yield
