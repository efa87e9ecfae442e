"""What a connection may send before it is served, over real sockets."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from fastapi import FastAPI

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.http_server.bounded_http import BoundedHttp, HttpLimits
from halfmoon_conductor.http_server.idle_connections import IdleConnections
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_runtime.allowed_hosts import AllowedHosts
from halfmoon_runtime.server_tls import server_context
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app
from halfmoon_testing.tls_authority import TlsAuthority

DEADLINE_S = 10
#: How long a refused client may still send. Both ends are on one loop, so it has read by then.
LINGER_S = 0.2
GET = b"GET /health HTTP/1.1\r\nhost: front\r\n"


class Address(NamedTuple):
    host: str
    port: int
    #: What clients trust; None: HTTP in the clear.
    trust: ssl.SSLContext | None


Open = Callable[[HttpLimits], Awaitable[Address]]


@pytest.fixture(scope="module")
def both_ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and of its clients."""
    authority = TlsAuthority(tmp_path_factory.mktemp("tls"))
    issued = authority.issue()
    return server_context(str(issued.cert), str(issued.key)), trust_context(str(authority.path))


@pytest.fixture(params=["http", "https"])
async def open_server(
    request: pytest.FixtureRequest,
    app: FastAPI,
    both_ends: tuple[ssl.SSLContext, ssl.SSLContext],
) -> AsyncIterator[Open]:
    server, trust = both_ends if request.param == "https" else (None, None)
    async with AsyncExitStack() as stack:

        async def open_it(limits: HttpLimits) -> Address:
            limits = msgspec.structs.replace(limits, linger_s=LINGER_S)
            host, port = await stack.enter_async_context(serve_app(app, limits, server))
            return Address(host, port, trust)

        yield open_it


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address.host, address.port, ssl=address.trust)


async def answer_to(address: Address, *pieces: bytes) -> bytes:
    """All that a client reads until the server hangs up, however much it sends."""
    reader, writer = await connect(address)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    sending = asyncio.create_task(send())
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return answer


def error_of(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


ENDLESS = {
    "one header": [GET + b"x-long: ", *[b"a" * 65_536] * 800],
    "one header's name": [GET, *[b"a" * 65_536] * 800],
    "many headers": [GET, *[b"x-many: some value of it\r\n" * 2_000] * 800],
    "tiny headers": [GET, *[b"a:\r\n" * 16_000] * 800],
    "the URL": [b"GET /", *[b"a" * 65_536] * 800],
    "the query": [b"GET /health?", *[b"a=b&" * 16_384] * 800],
    "trailers": [
        b"POST /v1/completions HTTP/1.1\r\nhost: front\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        *[b"x-many: some value of it\r\n" * 2_000] * 800,
    ],
    "a chunk's extension": [
        b"POST /v1/completions HTTP/1.1\r\nhost: front\r\ntransfer-encoding: chunked\r\n\r\n1",
        *[b";" + b"a" * 65_536] * 800,
    ],
    "tiny chunks": [
        b"POST /v1/completions HTTP/1.1\r\nhost: front\r\ntransfer-encoding: chunked\r\n\r\n",
        *[b"1\r\n \r\n" * 10_000] * 200,
    ],
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_refused_while_it_still_arrives(
    open_server: Open, what: str
) -> None:
    answer = await answer_to(await open_server(HttpLimits()), *ENDLESS[what])
    status, error = error_of(answer)
    expected = {
        "the URL": (414, "url_too_long"),
        "the query": (414, "url_too_long"),
        "tiny chunks": (413, "body_too_large"),
    }
    assert (status, error["code"]) == expected.get(what, (431, "headers_too_large"))
    assert any(limit in error["message"] for limit in ("65536", "8192", "128"))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GET + b"x-long: " + b"a" * 60_000 + b"\r\n", 200),
        (GET + b"x-long: " + b"a" * 70_000 + b"\r\n", 431),
        (GET + b"x-many: v\r\n" * 120, 200),
        (GET + b"x-many: v\r\n" * 130, 431),
        (b"GET /health?" + b"a" * 8_000 + b" HTTP/1.1\r\nhost: front\r\n", 200),
        (b"GET /health?" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: front\r\n", 414),
        (b"GET /health\x01 HTTP/1.1\r\nhost: front\r\n", 400),
    ],
)
@pytest.mark.parametrize("n_at_once", [1, 1000, 1_000_000])
async def test_a_head_is_refused_over_its_limits_and_served_below_them(
    open_server: Open, head: bytes, status: int, n_at_once: int
) -> None:
    sent = head + b"connection: close\r\n\r\n"
    if n_at_once == 1 and len(sent) > 10_000:
        n_at_once = 7
    pieces = [sent[i : i + n_at_once] for i in range(0, len(sent), n_at_once)]
    answer = await answer_to(await open_server(HttpLimits()), *pieces)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


async def test_limits_are_of_each_request_and_not_of_the_connection(open_server: Open) -> None:
    address = await open_server(HttpLimits(max_head_bytes=1000, max_headers=5))
    reader, writer = await connect(address)
    body = b"x" * 5000
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(5):
            writer.write(
                b"POST /nowhere HTTP/1.1\r\nhost: front\r\nx-long: " + b"a" * 600 + b"\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
    writer.close()


async def test_requests_sent_ahead_are_answered_in_order_up_to_a_limit(open_server: Open) -> None:
    address = await open_server(HttpLimits(max_pipelined=4))
    answer = await answer_to(address, (GET + b"\r\n") * 4 + GET + b"connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    reader, writer = await connect(address)
    writer.write((GET + b"\r\n") * 100_000)
    n_answers = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(DEADLINE_S):
            while line := await reader.readline():
                n_answers += line == b"HTTP/1.1 200 OK\r\n"
    assert n_answers <= 6
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", GET + b"x-half: "])
async def test_a_connection_whose_headers_do_not_come_is_closed(
    open_server: Open, sent: bytes
) -> None:
    answer = await answer_to(await open_server(HttpLimits(head_timeout_s=0.2)), sent)
    if sent:
        assert error_of(answer)[0] == 408
    else:
        assert answer == b""


async def test_later_requests_of_a_connection_have_the_same_time(open_server: Open) -> None:
    address = await open_server(HttpLimits(head_timeout_s=0.2))
    answer = await answer_to(address, GET + b"\r\n", GET + b"x-half: ")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408 Request Timeout" in answer


async def test_a_body_that_nothing_reads_is_not_waited_for(open_server: Open) -> None:
    address = await open_server(HttpLimits(head_timeout_s=0.2))
    head = b"GET /health HTTP/1.1\r\nhost: front\r\ncontent-length: 7999999\r\n\r\n"
    assert (await answer_to(address, head)).startswith(b"HTTP/1.1 200 OK")
    address = await open_server(HttpLimits(head_timeout_s=60))
    assert (await answer_to(address, head, *[b"a" * 65_536] * 100)).startswith(b"HTTP/1.1 200 OK")


async def ask_for_much(
    address: Address, max_tokens: int = 90_000_000
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream, which is longer than all buffers unless told; read its first event."""
    reader, writer = await connect(address)
    asked = {"model": "lab/moon", "prompt": "Say it", "max_tokens": max_tokens, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: front\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: ")
    return reader, writer


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(
    open_server: Open, gateway: ScriptedGateway, card: ModelCard
) -> None:
    gateway.script = [70]
    gateway.card = msgspec.structs.replace(card, max_context=100_000_000)
    _, writer = await ask_for_much(await open_server(HttpLimits(unread_s=0.3)))
    async with asyncio.timeout(60):
        while not gateway.cancelled:
            await asyncio.sleep(0.01)
    writer.transport.abort()


def test_a_client_that_takes_a_little_is_not_cut_off_until_it_takes_nothing() -> None:
    waiting, timers, aborted = [100], [], []
    http: Any = BoundedHttp.__new__(BoundedHttp)
    http.loop = SimpleNamespace(call_later=lambda _, *timer: timers.append(timer))
    http.transport = SimpleNamespace(
        get_write_buffer_size=lambda: waiting[0], abort=lambda: aborted.append(True)
    )
    http._set_unread_timer()
    for waiting[0] in (99, 40, 40):
        assert not aborted
        when_due, *given = timers.pop()
        when_due(*given)
    assert aborted
    assert not timers


async def test_the_kernel_asks_after_a_client_that_may_have_vanished(open_server: Open) -> None:
    reader, writer = await connect(await open_server(HttpLimits()))
    writer.write(GET + b"\r\n")
    await reader.readline()
    with server_side(writer.get_extra_info("sockname")) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        after_s, every_s, times, unacknowledged_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
    assert after_s + times * every_s == unacknowledged_ms / 1000 == 120
    writer.close()


def server_side(client: tuple[str, int]) -> socket.socket:
    """Return the server's socket of a connection: it is one of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            fd = os.dup(int(path.name))
            try:
                found = socket.socket(fileno=fd)
            except OSError:
                os.close(fd)
                continue
            with suppress(OSError):
                if found.getpeername() == client:
                    return found
            found.close()
    raise AssertionError(f"no socket is connected to {client}")


async def test_connections_are_bounded(open_server: Open, gateway: ScriptedGateway) -> None:
    gateway.n_before_pause = 1
    address = await open_server(HttpLimits(max_connections=2))
    at_work = [await ask_for_much(address, max_tokens=4) for _ in range(2)]
    assert error_of(await answer_to(address))[0] == 429
    gateway.resume.set()
    for reader, writer in at_work:
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b"[DONE]")
        writer.close()


async def ask_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask on a connection that is kept, and read the whole answer."""
    writer.write(GET + b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b'{"status":"ok"}')


async def test_an_idle_connection_gives_way_to_a_new_one(open_server: Open) -> None:
    address = await open_server(HttpLimits(max_connections=3))
    kept = [await connect(address) for _ in range(3)]
    for index in (0, 1, 2, 0):  # the second is then idle for the longest time
        await ask_once(*kept[index])
    newest = await connect(address)
    await ask_once(*newest)
    async with asyncio.timeout(DEADLINE_S):
        assert await kept[1][0].read() == b""
    for still_open in (kept[0], kept[2], newest):
        await ask_once(*still_open)
        still_open[1].close()


async def test_many_more_clients_than_connections_are_served_one_after_the_other(
    open_server: Open,
) -> None:
    address = await open_server(HttpLimits(max_connections=2))
    kept = []
    for _ in range(10):
        kept.append(await connect(address))
        await ask_once(*kept[-1])
    for _, writer in kept:
        writer.close()


def test_a_client_that_still_reads_its_answer_does_not_give_way() -> None:
    def of(n_unsent: int) -> Any:
        aborted: list[bool] = []
        transport = SimpleNamespace(
            get_write_buffer_size=lambda: n_unsent, abort=lambda: aborted.append(True)
        )
        return SimpleNamespace(transport=transport, aborted=aborted)

    reading, done = Named(of(9)), Named(of(0))
    idle, connections = IdleConnections(), {reading, done}
    idle.add(reading, 1.0)
    idle.add(done, 2.0)
    assert idle.make_room(connections) and connections == {reading}
    assert done.it.aborted and not reading.it.aborted
    assert not idle.make_room(connections) and len(idle) == 1


class Named:
    """Anything, as a member of a set."""

    def __init__(self, it: Any) -> None:
        self.it = it
        self.transport = it.transport


async def test_a_connection_is_kept_for_its_time_and_blank_lines_do_not_prolong_it(
    open_server: Open,
) -> None:
    longer = await connect(await open_server(HttpLimits(keep_alive_s=3600)))
    await ask_once(*longer)
    address = await open_server(HttpLimits(keep_alive_s=0.2))
    silent, blank = await connect(address), await connect(address)
    for connection in (silent, blank):
        await ask_once(*connection)
    blank[1].write(b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert await silent[0].read() == await blank[0].read() == b""
    await ask_once(*longer)
    longer[1].close()


async def test_a_connection_whose_body_ends_after_the_answer_is_closed_in_time_too(
    open_server: Open,
) -> None:
    reader, writer = await connect(await open_server(HttpLimits(keep_alive_s=0.2)))
    writer.write(b"GET /health HTTP/1.1\r\nhost: front\r\ncontent-length: 4\r\n\r\nha")
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"lf")
        assert await reader.read() == b""


def test_a_connection_is_kept_longer_than_load_balancers_keep_theirs() -> None:
    kept = ConductorSettings.from_args(["--model", "m"]).keep_alive_s
    assert kept == HttpLimits().keep_alive_s == 75
    # AWS and many others have 60 s.
    assert kept > 60


HOSTS = {
    "": 400,
    "host: \r\n": 400,
    "host: front\r\nhost: front\r\n": 400,
    "host: front\r\nHOST: other\r\n": 400,
    "host: front, other\r\n": 400,
    "host: http://front\r\n": 400,
    "host: user@front\r\n": 400,
    "host: front/path\r\n": 400,
    "host: front:port\r\n": 400,
    "host: front:65536\r\n": 400,
    "host: front:80:80\r\n": 400,
    "host: [::1\r\n": 400,
    "host: ::1\r\n": 400,
    "host: [1.2.3]\r\n": 400,
    "host: fr\u00f6nt\r\n": 400,
    "host: front%2\r\n": 400,
    f"host: {'a' * 254}\r\n": 400,
    "host: front\r\n": 200,
    "host:front:8000 \r\n": 200,
    "host: FRONT.:\r\n": 200,
    "host: [::1]:8000\r\n": 200,
    "host: my_front-1.lab\r\n": 200,
}


async def test_a_request_has_one_host_of_the_right_form(
    app: FastAPI,
) -> None:
    async with serve_app(app) as address:
        for headers, status in HOSTS.items():
            sent = f"GET /health HTTP/1.1\r\n{headers}connection: close\r\n\r\n".encode()
            answer = await answer_to(Address(*address, None), sent)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), headers
            if status == 400:
                assert "Host" in error_of(answer)[1]["message"], headers


async def test_an_old_client_needs_no_host_and_has_no_two(app: FastAPI) -> None:
    async with serve_app(app, hosts=AllowedHosts(())) as address:
        for headers, status in (("", 200), ("host: a\r\nhost: a\r\n", 400)):
            sent = f"GET /version HTTP/1.0\r\n{headers}\r\n".encode()
            answer = await answer_to(Address(*address, None), sent)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("/v1/models", "rebound.example", 421),
        ("/v1/models", "127.0.0.1.rebound.example", 421),
        ("/v1/models", "localhost.rebound.example", 421),
        ("/v1/models", "notlocalhost", 421),
        ("/debug/cluster", "rebound.example:8000", 421),
        ("/metrics", "rebound.example", 421),
        ("/", "rebound.example", 421),
        ("/health/../v1/models", "rebound.example", 421),
        ("http://rebound.example/v1/models", "localhost", 421),
        ("http://localhost/v1/models", "rebound.example", 200),
        ("/health", "rebound.example", 200),
        ("/ready?verbose", "rebound.example", 200),
        ("/v1/models", "localhost:8000", 200),
        ("/v1/models", "app.localhost", 200),
        ("/v1/models", "127.0.0.1:8000", 200),
        ("/v1/models", "10.1.2.3", 200),
        ("/v1/models", "[::1]:8000", 200),
        ("/v1/models", "Gpu1.Lab.Example.", 200),
        ("/v1/models", "any.below.example", 200),
        ("/v1/models", "below.example", 421),
    ],
)
async def test_a_name_that_is_not_ours_is_refused_with_the_way_out(
    app: FastAPI, target: str, host: str, status: int
) -> None:
    async with serve_app(app, hosts=AllowedHosts(["gpu1.lab.example", "*.below.example"])) as to:
        sent = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        answer = await answer_to(Address(*to, None), sent.encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 421:
        told = error_of(answer)[1]
        assert told["code"] == "host_not_allowed"
        named = "rebound.example" if "://" in target else host.partition(":")[0]
        assert repr(named) in told["message"]
        assert f"--allowed-hosts {named}" in told["message"]


async def test_a_refusal_of_head_has_no_body(app: FastAPI) -> None:
    async with serve_app(app, hosts=AllowedHosts(())) as address:
        sent = b"HEAD /v1/models HTTP/1.1\r\nhost: rebound.example\r\n\r\n"
        answer = await answer_to(Address(*address, None), sent)
    assert answer.startswith(b"HTTP/1.1 421 ") and answer.endswith(b"\r\n\r\n")


async def test_a_rebound_name_generates_nothing(app: FastAPI, gateway: ScriptedGateway) -> None:
    body = b'{"model":"lab/moon","prompt":"Say it"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: rebound.example\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serve_app(app, hosts=AllowedHosts(())) as address:
        assert error_of(await answer_to(Address(*address, None), head + body))[0] == 421
    assert gateway.requests == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/version", "/", "/nowhere"])
async def test_head_has_the_headers_of_get_and_leaves_the_connection_usable(
    open_server: Open, path: str
) -> None:
    address = await open_server(HttpLimits())
    last = b"GET /ping HTTP/1.1\r\nhost: front\r\nconnection: close\r\n\r\n"
    told = {}
    for method in ("HEAD", "GET"):
        sent = f"{method} {path} HTTP/1.1\r\nhost: front\r\n\r\n".encode()
        first, _, rest = (await answer_to(address, sent + last)).partition(b"\r\n\r\n")
        kept = (b"HTTP/", b"content-type:", b"content-length:")
        told[method] = [line for line in first.split(b"\r\n") if line.startswith(kept)]
        no_body_between = rest.startswith(b"HTTP/1.1 200 OK\r\n")
        assert no_body_between == (method == "HEAD")
    assert told["HEAD"] == told["GET"] and len(told["GET"]) == 3


async def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_the_connection(
    open_server: Open,
) -> None:
    asked = {"model": "lab/moon", "prompt": "Say it", "max_tokens": 5, "stream": True}
    body = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = await answer_to(await open_server(HttpLimits()), head + body)
    headers, _, events = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    assert events.startswith(b"data: ") and events.endswith(b"data: [DONE]\n\n")


async def test_an_old_client_gets_an_answer_of_known_length_whole(open_server: Open) -> None:
    answer = await answer_to(await open_server(HttpLimits()), b"GET /ping HTTP/1.0\r\n\r\n")
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in headers and json.loads(body) == {"status": "ok"}
