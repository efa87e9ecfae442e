"""What a conductor holds for bodies goes with them.

Measured is the memory of the conductor's process that is no file's (`RssAnon` of proc(5)).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from urllib.parse import urlsplit

import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from tests.nightly import by_day

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MIB = 1024 * 1024
DEADLINE_S = 60
#: Clients that send all but the end of a body; at night as many as `--max-bodies-mib` lets in.
N_BODIES = by_day(40, at_night=130)
SENT_BYTES, BODY_BYTES, PIECE_BYTES = round(7.8 * MIB), 8 * MIB, 64 * 1024
#: Of 300 MiB and more. The conductor gives memory back after each 32 MiB that were freed.
MOST_KEPT_BYTES = 48 * MIB


@dataclass
class LoneConductor:
    """A conductor's process, with the metadata server in it and no worker."""

    process: ServiceProcess

    @property
    def url(self) -> str:
        return str(self.process.status["url"])

    @property
    def own_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def connect(self) -> socket.socket:
        where = urlsplit(self.url)
        assert where.hostname is not None and where.port is not None
        return socket.create_connection((where.hostname, where.port), DEADLINE_S)


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[LoneConductor]:
    flags = ("--model=fake://tiny", "--metadata=embedded", "--http-port=0", "--metadata-port=0")
    process = ServiceProcess(ProcessSpec("conductor-0", "conductor", flags), tmp_path)
    try:
        await until(lambda: process.stage == "ready")
        yield LoneConductor(process)
    finally:
        process.signal(SIGKILL)
        process.wait(DEADLINE_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_memory_of_half_sent_bodies_is_given_back_once_their_clients_are_gone(
    conductor: LoneConductor,
) -> None:
    before = conductor.own_bytes
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY_BYTES}\r\n\r\n"
    )
    piece = b" " * PIECE_BYTES
    clients = [conductor.connect() for _ in range(N_BODIES)]
    for client in clients:
        client.sendall(head.encode())
    for _ in range(SENT_BYTES // PIECE_BYTES):  # in turn: pieces of all bodies lie side by side
        for client in clients:
            client.sendall(piece)
    await until(lambda: conductor.own_bytes > before + N_BODIES * SENT_BYTES * 0.8)
    # Clients that stay: what they need lies above the bodies.
    stays = [conductor.connect() for _ in range(20)]
    for client in stays:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(1024).startswith(b"HTTP/1.1 200")
    for client in clients:
        client.close()
    await until(lambda: conductor.own_bytes < before + MOST_KEPT_BYTES)
    for client in stays:
        client.close()
