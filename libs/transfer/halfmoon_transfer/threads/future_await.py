"""Await a thread's result from asyncio; cancelling the waiter does not cancel the thread."""

import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def await_future(future: "Future[Result]") -> Generator[object, None, Result]:
    """Wait for a future and return its result, for an ``__await__``.

    Unlike with a shielded `asyncio.wrap_future`, a cancelled waiter leaves no future behind whose
    exception asyncio would report as never retrieved.

    Raises:
        Exception: the future's.
    """
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def end_wait() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: "Future[Result]") -> None:
            # A loop that was closed meanwhile raises; it has no waiters any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end_wait)

        future.add_done_callback(wake)
        yield from waiter
    return future.result(0)
