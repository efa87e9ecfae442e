"""Notice that a client has gone away, and stop working for it.

A server tells an app that its client hung up only when the app asks for the next message, so
somebody must be asking all the while.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before it had its answer."""


async def unless_client_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Do `work` for a client whose request has been read to its end.

    When the client hangs up first, `work` is cancelled, and has ended when this returns. It is
    done in the caller's task: another one would cost every token a detour.

    Raises:
        ClientGone: it did.
    """
    listening, over = asyncio.create_task(_gone(receive)), False
    try:
        # A limit of time that the client sets by hanging up.
        async with asyncio.timeout(None) as limit:

            def on_gone(_: "asyncio.Task[None]") -> None:
                if not over:
                    limit.reschedule(asyncio.get_running_loop().time())

            listening.add_done_callback(on_gone)
            return await work
    except TimeoutError:
        if limit.expired():
            raise ClientGone from None
        raise
    finally:
        over = True
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
