"""What a conductor holds for bodies and workers goes with them.

Measured is the memory of the conductor's process that is no file's (`RssAnon` of proc(5)).
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from halfmoon_cli.up.embedded_cluster import ServiceProcess
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_metadata.store_registry import open_store
from halfmoon_protocol.bounds import MAX_CODE, MAX_FEATURES
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_events import BlockStored
from halfmoon_protocol.messages import (
    DecodeLoad,
    Hello,
    KvstoreLoad,
    Message,
    PrefillLoad,
    Welcome,
)
from halfmoon_runtime.channels.network import Port
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import Membership, next_generation
from halfmoon_testing.scheduling_inputs import LAYOUT, a_worker
from tests.e2e.conftest import lone_conductor
from tests.nightly import by_day

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MIB = 1024 * 1024
DEADLINE_S = 60
#: Clients that send all but the end of a body; at night as many as `--max-bodies-mib` lets in.
N_BODIES = by_day(40, at_night=130)
SENT_BYTES, BODY_BYTES, PIECE_BYTES = round(7.8 * MIB), 8 * MIB, 64 * 1024
#: Of 300 MiB and more. The conductor gives memory back after each 32 MiB that were freed.
MOST_KEPT_BYTES = 48 * MIB
#: Joins of workers under new names, those after which memory is level, and workers at a time.
N_JOINS, N_WARM, N_AT_ONCE = 2000, 100, 25
#: The records of 2,000 workers take twice as much. What is in use stays level; freed pieces between
#: others that are in use come to some 30 MiB in the first thousands of joins, and to no more.
MOST_GROWTH_BYTES = 48 * MIB
LEASE_S = 1.0
PAUSE_S = 0.2
STORED = BlockStored(
    block_hashes=tuple(i.to_bytes(32, "big") for i in range(64)),
    parent_block_hash=None,
    token_ids=(),
    block_size=LAYOUT.block_size,
)
#: A record as long as it may be, so that one that stays shows.
FEATURES = tuple(f"{i:0{MAX_CODE}}" for i in range(MAX_FEATURES))
LOADS: dict[str, Message] = {
    "prefill": PrefillLoad(n_queued=0, queued_tokens=0, free_pages=64, n_pages=64),
    "decode": DecodeLoad(
        n_running=0, n_reserved=0, context_tokens=0, free_pages=64, n_pages=64, step_s=0.01
    ),
    "kvstore": KvstoreLoad(n_stored=64, n_reserved=0, n_leased=0, n_blocks=64, sequence=0),
}


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
def conductor(tmp_path: Path) -> Iterator[LoneConductor]:
    with lone_conductor(tmp_path) as process:
        yield LoneConductor(process)


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


class Worker:
    """A worker over real sockets, which tells what it holds, and nothing as it ends."""

    def __init__(self, port: Port, membership: Membership) -> None:
        self.port, self.membership = port, membership
        self.worker_id = membership.info.worker_id
        self.serving = asyncio.create_task(self.serve())

    @classmethod
    async def start(cls, name: str, network: ZmqNetwork, store: MetadataStore) -> "Worker":
        port = await network.bind(name)
        generation = await next_generation(store, WorkerId(name))
        info = msgspec.structs.replace(
            a_worker(name, generation=generation, features=FEATURES),
            commands=port.commands,
            events=port.events,
        )
        membership = Membership(store, info, ttl_s=LEASE_S)
        await membership.join()
        return cls(port, membership)

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.keep_alive())
            tasks.create_task(self.tell())
            while True:
                peer, message = await self.port.receive()
                if isinstance(message, Hello):
                    await self.port.send(peer, Welcome(worker=self.membership.info))

    async def tell(self) -> None:
        """Publish again and again: what is said as a link begins may be missed."""
        load = LOADS[self.membership.info.role]
        while True:
            if isinstance(load, KvstoreLoad):
                await self.port.publish_kv([STORED])
            await self.port.publish(load)
            await asyncio.sleep(PAUSE_S)

    async def die(self) -> None:
        self.serving.cancel()
        await asyncio.wait([self.serving])
        await self.port.close()


@pytest.mark.nightly("thousands of workers that join and die leave no memory behind")
async def test_memory_is_level_however_many_workers_join_under_new_names_and_die(
    conductor: LoneConductor,
) -> None:
    names = (f"{role}-{i}" for i in itertools.count() for role in LOADS)
    network, store = ZmqNetwork(), open_store(str(conductor.process.status["metadata"]))
    after: list[int] = []
    async with httpx.AsyncClient(base_url=conductor.url, timeout=DEADLINE_S) as client:
        for n in range(N_AT_ONCE, N_JOINS + 1, N_AT_ONCE):
            starts = [Worker.start(next(names), network, store) for _ in range(N_AT_ONCE)]
            workers = await asyncio.gather(*starts)
            await until_seen(client, {each.worker_id for each in workers})
            assert (await client.get("/metrics")).status_code == 200
            await asyncio.gather(*(each.die() for each in workers))
            await until_seen(client, set())
            if n % N_WARM == 0:
                after.append(conductor.own_bytes)
    print("MiB after each 100 joins:", [round(each / MIB, 1) for each in after])
    assert conductor.own_bytes < after[0] + MOST_GROWTH_BYTES
    await network.close()
    store.close()


async def until_seen(client: httpx.AsyncClient, expected: set[WorkerId]) -> None:
    """Wait until the conductor uses these workers and no other, and has heard of their load."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            workers = (await client.get("/debug/cluster")).json()["workers"]
            heard = {each["worker_id"] for each in workers if each["heard_s_ago"] is not None}
            if heard == expected and len(workers) == len(expected):
                return
            await asyncio.sleep(0.02)
