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
            self._gone.set()
            await self.never.wait()  # a full socket whose reader is gone
        self.taken.append(message)

    def hang_up(self) -> None:
        self._gone.set()


def words_of(error: Exception) -> bytes:
    return format_event(f"sorry: {error}")


async def sent_to(client: Client, events: AsyncGenerator[bytes, None]) -> None:
    """Send events as the door has it done."""
    stream = EventStream(events, words_of)
    scope: dict[str, object] = {"type": "http"}
    await unless_client_gone(client.receive, stream(scope, client.receive, client.send))


async def test_events_are_closed_when_the_client_goes_while_one_is_being_sent() -> None:
    closed = False

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            while True:
                yield format_event("x")
        finally:
            closed = True

    client, events = Client(takes=3), endless()
    with pytest.raises(ClientGone):
        await sent_to(client, events)
    assert closed
    assert [message["type"] for message in client.taken] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]


async def test_events_are_closed_when_the_client_goes_before_the_first() -> None:
    client = Client(takes=100)
    closed = False

    async def silent() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            client.hang_up()
            await client.never.wait()
            yield b""
        finally:
            closed = True

    events = silent()
    with pytest.raises(ClientGone):
        await sent_to(client, events)
    assert closed
    assert not client.taken


async def test_what_is_raised_before_the_first_event_is_left_to_others() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        for found in [format_event("x")]:
            if found:
                raise LookupError("early")
            yield found

    client = Client(takes=100)
    with pytest.raises(LookupError, match="early"):
        await EventStream(failing(), words_of)({"type": "http"}, client.receive, client.send)
    assert not client.taken


async def test_what_is_raised_later_is_the_last_event() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield format_event("x")
        raise LookupError("late")

    client = Client(takes=100)
    await EventStream(failing(), words_of)({"type": "http"}, client.receive, client.send)
    bodies = [message["body"] for message in client.taken[1:]]
    assert bodies == [b"data: x\n\n", b"data: sorry: late\n\n", b""]
    assert client.taken[-1]["more_body"] is False


async def test_work_that_is_done_is_worth_more_than_a_client_that_is_gone() -> None:
    client = Client(takes=0)

    async def work() -> int:
        client.hang_up()
        return 7

    assert await unless_client_gone(client.receive, work()) == 7


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


async def test_no_work_begins_for_a_client_that_a_connection_knows_as_gone() -> None:
    connection, began = Connection(), False

    async def work() -> None:
        nonlocal began
        began = True

    connection.hang_up()
    with pytest.raises(ClientGone):
        await unless_client_gone(never_received, work(), connection)
    assert not began


async def test_a_connection_is_told_nothing_more_once_its_request_is_answered() -> None:
    connection = Connection()

    async def work() -> int:
        return 7

    assert await unless_client_gone(never_received, work(), connection) == 7
    connection.hang_up()
    await asyncio.sleep(0)  # a cancellation would be raised here


@pytest.mark.parametrize("is_told", [False, True])
async def test_work_is_over_when_its_client_is_gone_or_its_server_stops(is_told: bool) -> None:
    for server_stops in (False, True):
        client, connection = Client(takes=0), Connection() if is_told else None
        began, ended = asyncio.Event(), asyncio.Event()

        async def work(
            client: Client = client, began: asyncio.Event = began, ended: asyncio.Event = ended
        ) -> None:
            began.set()
            try:
                await client.never.wait()
            finally:
                await asyncio.sleep(0)  # cleaning up takes a while
                ended.set()

        receive = never_received if is_told else client.receive
        task = asyncio.create_task(unless_client_gone(receive, work(), connection))
        await began.wait()
        if server_stops:
            task.cancel()
        elif connection is not None:
            connection.hang_up()
        else:
            client.hang_up()
        with pytest.raises(asyncio.CancelledError if server_stops else ClientGone):
            await task
        assert ended.is_set()


async def test_the_end_of_a_stream_leaves_with_its_last_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield format_event("x")
        yield format_event("y") + DONE

    client = Client(takes=100)
    await EventStream(events(), words_of)({"type": "http"}, client.receive, client.send)
    bodies = [(message["body"], message["more_body"]) for message in client.taken[1:]]
    assert bodies == [(b"data: x\n\n", True), (b"data: y\n\ndata: [DONE]\n\n", False)]
