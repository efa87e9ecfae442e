"""A stream of events that ends when its client does."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from halfmoon_conductor.api.sse import DONE, EventStream, format_event
from halfmoon_conductor.http_server.disconnect import ClientGone, unless_client_gone


class Client:
    """The far end of an ASGI app: takes so many messages, then hangs up."""

    def __init__(self, *, takes: int) -> None:
        self.taken: list[dict[str, Any]] = []
        self._takes = takes
        self._gone = asyncio.Event()
        self.never = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.taken) == self._takes:
            self.hang_up()
            await self.never.wait()  # a full socket whose reader is gone
        self.taken.append(message)

    def hang_up(self) -> None:
        self._gone.set()


async def test_the_end_of_a_stream_leaves_with_its_last_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield format_event("x")
        yield format_event("y") + DONE

    client = Client(takes=100)
    stream = EventStream(events(), lambda error: b"")
    await stream({"type": "http"}, client.receive, client.send)
    bodies = [(message["body"], message["more_body"]) for message in client.taken[1:]]
    assert bodies == [(b"data: x\n\n", True), (b"data: y\n\ndata: [DONE]\n\n", False)]


class Connection:
    """A connection that says when its client is gone."""

    def __init__(self) -> None:
        self.is_receiving = False
        self.is_lost = False
        self.on_gone: Callable[[], None] | None = None

    def hang_up(self) -> None:
        self.is_lost = True
        if self.on_gone is not None:
            self.on_gone()


async def never_received() -> dict[str, Any]:
    raise AssertionError("a connection that tells of its client is not asked for messages")


async def test_work_that_is_done_is_worth_more_than_a_client_that_is_gone() -> None:
    client, connection = Client(takes=0), Connection()

    async def work() -> int:
        client.hang_up()
        return 7

    assert await unless_client_gone(client.receive, work()) == 7
    # And a connection is told nothing more once its request is answered.
    assert await unless_client_gone(never_received, work(), connection) == 7
    connection.hang_up()
    await asyncio.sleep(0)  # a cancellation would be raised here


async def test_no_work_begins_for_a_client_that_a_connection_knows_as_gone() -> None:
    connection, began = Connection(), asyncio.Event()

    async def work() -> None:
        began.set()

    connection.hang_up()
    with pytest.raises(ClientGone):
        await unless_client_gone(never_received, work(), connection)
    assert not began.is_set()


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("server_stops", [False, True])
async def test_work_is_over_when_its_client_is_gone_or_its_server_stops(
    is_told: bool, server_stops: bool
) -> None:
    client, connection = Client(takes=0), Connection()
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await client.never.wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a while
            ended.set()

    if is_told:
        working = unless_client_gone(never_received, work(), connection)
    else:
        working = unless_client_gone(client.receive, work())
    task = asyncio.create_task(working)
    await began.wait()
    if server_stops:
        task.cancel()
    else:
        hang_up = connection.hang_up if is_told else client.hang_up
        hang_up()
    with pytest.raises(asyncio.CancelledError if server_stops else ClientGone):
        await task
    assert ended.is_set()
