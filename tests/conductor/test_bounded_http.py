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


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: front\r\ntransfer-encoding: chunked\r\n\r\n"
A_LOT = [b"a" * 65_536] * 800
MANY = [b"x-many: some value of it\r\n" * 2_000] * 800
HEADERS = (431, "headers_too_large")
URL = (414, "url_too_long")
ENDLESS = {
    "one header": ([GET + b"x-long: ", *A_LOT], HEADERS),
    "one header's name": ([GET, *A_LOT], HEADERS),
    "many headers": ([GET, *MANY], HEADERS),
    "tiny headers": ([GET, *[b"a:\r\n" * 16_000] * 800], HEADERS),
    "the URL": ([b"GET /", *A_LOT], URL),
    "the query": ([b"GET /health?", *[b"a=b&" * 16_384] * 800], URL),
    "trailers": ([CHUNKED + b"0\r\n", *MANY], HEADERS),
    "a chunk's extension": ([CHUNKED + b"1", *[b";" + b"a" * 65_536] * 800], HEADERS),
    "tiny chunks": ([CHUNKED, *[b"1\r\n \r\n" * 10_000] * 200], (413, "body_too_large")),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_refused_while_it_still_arrives(
    open_server: Open, what: str
) -> None:
    sent, refusal = ENDLESS[what]
    status, error = error_of(await answer_to(await open_server(HttpLimits()), *sent))
    assert (status, error["code"]) == refusal
    assert any(limit in error["message"] for limit in ("65536", "8192", "128"))


HEADS = [
    (GET + b"x-long: " + b"a" * 60_000 + b"\r\n", 200),
    (GET + b"x-long: " + b"a" * 70_000 + b"\r\n", 431),
    (GET + b"x-many: v\r\n" * 120, 200),
    (GET + b"x-many: v\r\n" * 130, 431),
    (b"GET /health?" + b"a" * 8_000 + b" HTTP/1.1\r\nhost: front\r\n", 200),
    (b"GET /health?" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: front\r\n", 414),
    (b"GET /health\x01 HTTP/1.1\r\nhost: front\r\n", 400),
]


@pytest.mark.parametrize("n_at_once", [1, 1000, 1_000_000])
async def test_a_head_is_refused_over_its_limits_and_served_below_them(
    open_server: Open, n_at_once: int
) -> None:
    address = await open_server(HttpLimits())
    for head, status in HEADS:
        sent = head + b"connection: close\r\n\r\n"
        step = 7 if n_at_once == 1 and len(sent) > 10_000 else n_at_once
        pieces = [sent[i : i + step] for i in range(0, len(sent), step)]
        answer = await answer_to(address, *pieces)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), head[:40]


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


async def test_a_connection_whose_headers_do_not_come_is_closed(open_server: Open) -> None:
    address = await open_server(HttpLimits(head_timeout_s=0.2))
    assert await answer_to(address, b"") == b""
    for sent in (b"GET /hea", GET + b"x-half: "):
        assert error_of(await answer_to(address, sent))[0] == 408
    # Later requests of a connection have the same time.
    answer = await answer_to(address, GET + b"\r\n", GET + b"x-half: ")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408 Request Timeout" in answer


async def test_a_body_that_nothing_reads_is_not_waited_for(open_server: Open) -> None:
    address = await open_server(HttpLimits(head_timeout_s=0.2))
    head = b"GET /health HTTP/1.1\r\nhost: front\r\ncontent-length: 7999999\r\n\r\n"
    assert (await answer_to(address, head)).startswith(b"HTTP/1.1 200 OK")
    address = await open_server(HttpLimits(head_timeout_s=60))
    assert (await answer_to(address, head, *[b"a" * 65_536] * 100)).startswith(b"HTTP/1.1 200 OK")


def completion(version: str = "1.1", headers: str = "host: front\r\n", **fields: Any) -> bytes:
    body = json.dumps({"model": "lab/moon", "prompt": "Say it", **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\n{headers}content-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


async def ask_for_much(
    address: Address, max_tokens: int = 90_000_000
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream, which is longer than all buffers unless told; read its first event."""
    reader, writer = await connect(address)
    writer.write(completion(max_tokens=max_tokens, stream=True))
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
        names = ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        after_s, every_s, times, unacknowledged_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in names
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


class Unsent:
    """A connection with so many bytes that its client has not taken."""

    def __init__(self, n: int) -> None:
        self.aborted = False
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: n, abort=self._abort)

    def _abort(self) -> None:
        self.aborted = True


def test_a_client_that_still_reads_its_answer_does_not_give_way() -> None:
    reading, done = Unsent(9), Unsent(0)
    idle: Any = IdleConnections()
    connections = {reading, done}
    idle.add(reading, 1.0)
    idle.add(done, 2.0)
    assert idle.make_room(connections) and connections == {reading}
    assert done.aborted and not reading.aborted
    assert not idle.make_room(connections) and len(idle) == 1


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


BAD_HOSTS = [
    "", "host: \r\n", "host: front\r\nhost: front\r\n", "host: front\r\nHOST: other\r\n",
    "host: front, other\r\n", "host: http://front\r\n", "host: user@front\r\n",
    "host: front/path\r\n", "host: front:port\r\n", "host: front:65536\r\n",
    "host: front:80:80\r\n", "host: [::1\r\n", "host: ::1\r\n", "host: [1.2.3]\r\n",
    "host: fr\u00f6nt\r\n", "host: front%2\r\n", f"host: {'a' * 254}\r\n",
]  # fmt: skip
HOSTS = [
    "host: front\r\n", "host:front:8000 \r\n", "host: FRONT.:\r\n", "host: [::1]:8000\r\n",
    "host: my_front-1.lab\r\n",
]  # fmt: skip


async def test_a_request_has_one_host_of_the_right_form(app: FastAPI) -> None:
    async with serve_app(app) as address:
        for headers in (*HOSTS, *BAD_HOSTS):
            sent = f"GET /health HTTP/1.1\r\n{headers}connection: close\r\n\r\n".encode()
            answer = await answer_to(Address(*address, None), sent)
            if headers in HOSTS:
                assert answer.startswith(b"HTTP/1.1 200 "), headers
            else:
                status, error = error_of(answer)
                assert status == 400 and "Host" in error["message"], headers


async def test_an_old_client_needs_no_host_and_has_no_two(app: FastAPI) -> None:
    async with serve_app(app, hosts=AllowedHosts(())) as address:
        for headers, status in (("", 200), ("host: a\r\nhost: a\r\n", 400)):
            sent = f"GET /version HTTP/1.0\r\n{headers}\r\n".encode()
            answer = await answer_to(Address(*address, None), sent)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())


STRANGE = [
    ("/v1/models", "rebound.example"),
    ("/v1/models", "127.0.0.1.rebound.example"),
    ("/v1/models", "localhost.rebound.example"),
    ("/v1/models", "notlocalhost"),
    ("/debug/cluster", "rebound.example:8000"),
    ("/metrics", "rebound.example"),
    ("/", "rebound.example"),
    ("/health/../v1/models", "rebound.example"),
    ("http://rebound.example/v1/models", "localhost"),
    ("/v1/models", "below.example"),
]
OURS = [
    ("http://localhost/v1/models", "rebound.example"),
    ("/health", "rebound.example"),
    ("/ready?verbose", "rebound.example"),
    ("/v1/models", "localhost:8000"),
    ("/v1/models", "app.localhost"),
    ("/v1/models", "127.0.0.1:8000"),
    ("/v1/models", "10.1.2.3"),
    ("/v1/models", "[::1]:8000"),
    ("/v1/models", "Gpu1.Lab.Example."),
    ("/v1/models", "any.below.example"),
]


async def test_a_name_that_is_not_ours_is_refused_with_the_way_out(
    app: FastAPI, gateway: ScriptedGateway
) -> None:
    async with serve_app(app, hosts=AllowedHosts(["gpu1.lab.example", "*.below.example"])) as at:
        to = Address(*at, None)

        async def ask(method: str, target: str, host: str) -> bytes:
            sent = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            return await answer_to(to, sent.encode())

        for target, host in OURS:
            assert (await ask("GET", target, host)).startswith(b"HTTP/1.1 200 "), (target, host)
        for target, host in STRANGE:
            status, told = error_of(await ask("GET", target, host))
            assert (status, told["code"]) == (421, "host_not_allowed"), (target, host)
            named = "rebound.example" if "://" in target else host.partition(":")[0]
            assert repr(named) in told["message"]
            assert f"--allowed-hosts {named}" in told["message"]
        answer = await ask("HEAD", *STRANGE[0])
        assert answer.startswith(b"HTTP/1.1 421 ") and answer.endswith(b"\r\n\r\n"), "no body"
        asked = completion(headers="host: rebound.example\r\n")
        assert error_of(await answer_to(to, asked))[0] == 421
    assert gateway.requests == []


async def test_head_has_the_headers_of_get_and_leaves_the_connection_usable(
    open_server: Open,
) -> None:
    address = await open_server(HttpLimits())
    last = b"GET /ping HTTP/1.1\r\nhost: front\r\nconnection: close\r\n\r\n"
    kept = (b"HTTP/", b"content-type:", b"content-length:")
    for path in ("/health", "/ready", "/v1/models", "/version", "/", "/nowhere"):
        told = {}
        for method in ("HEAD", "GET"):
            sent = f"{method} {path} HTTP/1.1\r\nhost: front\r\n\r\n".encode()
            first, _, rest = (await answer_to(address, sent + last)).partition(b"\r\n\r\n")
            told[method] = [line for line in first.split(b"\r\n") if line.startswith(kept)]
            no_body_between = rest.startswith(b"HTTP/1.1 200 OK\r\n")
            assert no_body_between == (method == "HEAD")
        assert told["HEAD"] == told["GET"] and len(told["GET"]) == 3


async def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_the_connection(
    open_server: Open,
) -> None:
    asked = completion("1.0", "connection: keep-alive\r\n", max_tokens=5, stream=True)
    answer = await answer_to(await open_server(HttpLimits()), asked)
    headers, _, events = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    assert events.startswith(b"data: ") and events.endswith(b"data: [DONE]\n\n")


async def test_an_old_client_gets_an_answer_of_known_length_whole(open_server: Open) -> None:
    answer = await answer_to(await open_server(HttpLimits()), b"GET /ping HTTP/1.0\r\n\r\n")
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in headers and json.loads(body) == {"status": "ok"}
