"""A worker in service: it answers, its metrics show, and the metadata server knows it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.observability.metrics import MetricSnapshot, expose_metrics


class ServableWorker(Protocol):
    """What every service's worker can do."""

    async def serve(self) -> None:
        """Answer until cancelled."""
        ...

    def metrics(self) -> MetricSnapshot:
        """What the metrics show."""
        ...


@asynccontextmanager
async def registered_worker(
    worker: ServableWorker,
    membership: Membership,
    service: Service,
    *more: Callable[[], MetricSnapshot],
) -> AsyncIterator[None]:
    """Be at work for the length of a block: opened in order, closed in reverse.

    As long as it is known, it answers.

    Args:
        worker: answers, and has metrics.
        membership: its record.
        service: its process.
        more: further metrics, of what the worker works with.

    Raises:
        Superseded: a later start of this worker is there.
    """
    async with AsyncExitStack() as stack:
        for read in (worker.metrics, membership.metrics, *more):
            stack.callback(expose_metrics(read))
        await stack.enter_async_context(service.running(worker.serve()))
        await membership.join()
        stack.push_async_callback(membership.leave)
        await stack.enter_async_context(service.running(membership.keep_alive()))
        service.ready()
        yield
