"""Waiting, from asyncio, for what a thread does: the waiter may be cancelled, the thread is not."""

import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def await_future(future: "Future[Result]") -> Generator[object, None, Result]:
    """What a future comes to, for an ``__await__``.

    Unlike a shielded `asyncio.wrap_future` nothing is left over by a waiter that was cancelled,
    of which asyncio would say that its exception was never retrieved.

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
            # A loop that was closed meanwhile raises: nobody waits there any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end_wait)

        future.add_done_callback(wake)
        yield from waiter
    return future.result(0)
