"""Notice that a client has disconnected, and cancel the work for it.

`bounded_http` tells of it by a call. Any other ASGI server reports a disconnect only when the app
awaits the next message, so a task awaits messages all the while.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope

T = TypeVar("T")

_SCOPE_KEY = "halfmoon.connection"


class ClientConnection(Protocol):
    """The connection of a request, where the server shows it."""

    #: Whether bytes of a request are still expected, so that its body may be incomplete.
    is_receiving: bool
    #: Whether the client is gone.
    is_lost: bool
    #: Called once the client is gone; None: nothing is to be told.
    on_gone: Callable[[], None] | None


def show_connection(scope: Scope, connection: ClientConnection) -> None:
    """Show a request its connection."""
    scope[_SCOPE_KEY] = connection


def connection_of(scope: Scope) -> ClientConnection | None:
    """Return the connection of a request; None: its server shows none."""
    connection: ClientConnection | None = scope.get(_SCOPE_KEY)
    return connection


class ClientGone(Exception):
    """A client that disconnected before its answer was complete."""


async def unless_client_gone(
    receive: Receive, work: Coroutine[None, None, T], connection: ClientConnection | None = None
) -> T:
    """Run `work` for a client whose request has been read completely.

    When the client disconnects first, `work` is cancelled and has ended when this returns. It runs
    in the caller's task: a task of its own would cost every token a context switch.

    Args:
        receive: the request's; awaited all the while if there is no connection.
        work: answers the request.
        connection: the request's; it has one request at a time that is answered.

    Raises:
        ClientGone: the client disconnected first.
    """
    if connection is None:
        return await _unless_disconnect_received(receive, work)
    if connection.is_lost:
        work.close()
        raise ClientGone
    task = asyncio.current_task()
    assert task is not None
    n_cancelling, is_gone = task.cancelling(), False

    def on_gone() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    connection.on_gone = on_gone
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() <= n_cancelling:
            raise ClientGone from None
        raise
    finally:
        connection.on_gone = None


async def _unless_disconnect_received(receive: Receive, work: Coroutine[None, None, T]) -> T:
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
