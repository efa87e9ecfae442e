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

    When the client hangs up first, `work` is cancelled, and has ended when this returns.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
