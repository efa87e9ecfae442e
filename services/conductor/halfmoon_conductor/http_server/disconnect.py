"""Notice that a client has disconnected, and cancel the work for it.

An ASGI server reports a disconnect only when the app awaits the next message, so a task awaits
messages all the while.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """A client that disconnected before its answer was complete."""


async def unless_client_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work` for a client whose request has been read completely.

    When the client disconnects first, `work` is cancelled and has ended when this returns. It runs
    in the caller's task: a task of its own would cost every token a context switch.

    Raises:
        ClientGone: the client disconnected first.
    """
    watcher, is_over = asyncio.create_task(_disconnected(receive)), False
    try:
        # A timeout that the client's disconnect sets to now.
        async with asyncio.timeout(None) as cancelled_when_gone:

            def on_gone(_: "asyncio.Task[None]") -> None:
                if not is_over:
                    cancelled_when_gone.reschedule(asyncio.get_running_loop().time())
                elif not watcher.cancelled():
                    watcher.exception()  # taken, so that it is not logged as lost

            watcher.add_done_callback(on_gone)
            return await work
    except TimeoutError:
        if cancelled_when_gone.expired():
            raise ClientGone from None
        raise
    finally:
        is_over = True
        watcher.cancel()  # it ends in the loop's next turn; nothing waits for that


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
