"""TLS handshakes that fail, never end, or come in odd pieces; on both event loops (conftest)."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from halfmoon_conductor.http_server.bounded_http import HttpLimits
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_runtime.server_tls import server_context
from halfmoon_testing.conductor_http import serve_app
from halfmoon_testing.tls_authority import TlsAuthority

DEADLINE_S = 20
GET = b"GET / HTTP/1.1\r\nhost: front\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TlsAuthority:
    return TlsAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def context(authority: TlsAuthority) -> ssl.SSLContext:
    issued = authority.issue()
    return server_context(str(issued.cert), str(issued.key))


async def hello(scope: Any, receive: Any, send: Any) -> None:
    body = f"{scope['scheme']} {scope['http_version']}".encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(context: ssl.SSLContext, **limits: Any) -> Any:
    # Both ends are on one loop: a client has read its answer long before.
    return serve_app(hello, HttpLimits(linger_s=0.2, **limits), context)


async def is_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed a connection, without a byte of an answer in the clear."""
    with contextlib.suppress(ConnectionError):
        assert not (await asyncio.wait_for(reader.read(), DEADLINE_S)).startswith(b"HTTP")


async def is_refused(host: str, port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    await is_closed(reader)
    writer.close()


async def is_served(port: int, authority: TlsAuthority) -> None:
    async with httpx.AsyncClient(verify=trust_context(str(authority.path))) as client:
        answer = await client.get(f"https://127.0.0.1:{port}/")
    assert (answer.status_code, answer.text) == (200, "https 1.1")


async def test_a_handshake_that_does_not_come_or_stays_half_is_closed(
    authority: TlsAuthority, context: ssl.SSLContext
) -> None:
    async with serve(context, head_timeout_s=0.3) as (host, port):
        for sent in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            await is_refused(host, port, sent)
        await is_served(port, authority)


async def test_what_is_no_tls_is_closed_and_no_exception_is_logged(
    authority: TlsAuthority, context: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with serve(context) as (host, port):
            for sent in (GET, b"\0" * 5000, b"\x16\x03\x01\x00\x05nonse"):
                for _ in range(3):
                    await is_refused(host, port, sent)
            await is_served(port, authority)
    assert not caplog.records


async def test_a_client_that_goes_away_in_its_handshake_leaves_nothing(
    authority: TlsAuthority, context: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with serve(context, max_connections=1) as (host, port):
            for _ in range(100):  # more than are let in at once
                _, writer = await asyncio.open_connection(host, port)
                writer.write(b"\x16\x03")
                writer.transport.abort()
            await until(lambda: is_served(port, authority))
    assert not caplog.records


async def until(attempt: Callable[[], Awaitable[None]]) -> None:
    """Repeat an attempt that fails while the server still closes connections."""
    while True:
        try:
            return await attempt()
        except (httpx.HTTPError, AssertionError):
            await asyncio.sleep(0.05)


async def test_handshakes_that_do_not_end_are_bounded_and_others_are_served_after_them(
    authority: TlsAuthority, context: ssl.SSLContext
) -> None:
    async with serve(context, max_connections=10, head_timeout_s=2) as (host, port):
        held = [await asyncio.open_connection(host, port) for _ in range(10 + 64)]
        reader, writer = await asyncio.open_connection(host, port)
        await is_closed(reader)  # and not only after 2 s: one of the others is open still
        assert not any(reader.at_eof() for reader, _ in held)
        writer.close()
        await asyncio.gather(*(is_closed(reader) for reader, _ in held))
        await is_served(port, authority)
        for _, writer in held:
            writer.close()


async def test_a_server_that_stops_waits_for_no_handshake(
    authority: TlsAuthority, context: ssl.SSLContext
) -> None:
    async with serve(context, head_timeout_s=3600) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x16")
        await is_served(port, authority)  # accepted later: the half one is in its handshake
    await is_closed(reader)
    writer.close()


@pytest.mark.parametrize("n_at_once", [1, 100, 1_000_000])
async def test_a_request_in_one_piece_with_the_end_of_the_handshake_is_answered(
    authority: TlsAuthority, context: ssl.SSLContext, n_at_once: int
) -> None:
    async with serve(context) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        to_us, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = trust_context(str(authority.path)).wrap_bio(
            to_us, to_server, server_hostname="localhost"
        )
        while True:
            try:
                end.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(to_server.read())
                to_us.write(await reader.read(65536))
        end.write(GET)
        sent = to_server.read()  # the client's Finished and its request
        for start in range(0, len(sent), n_at_once):
            writer.write(sent[start : start + n_at_once])
            await asyncio.sleep(0)
        answer = b""
        while b"https 1.1" not in answer:
            try:
                answer += end.read()
            except ssl.SSLWantReadError:
                to_us.write(await reader.read(65536))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        writer.close()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_of_tls_are_not_spoken(context: ssl.SSLContext) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")

    async with serve(context) as (host, port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, port, ssl=old)
