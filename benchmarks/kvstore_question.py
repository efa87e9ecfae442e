"""Measure one question to a kvstore: a lease of 1 and of 64 blocks, in wall and processor time.

Beside it in the same rounds: a bare echo over TCP with uvloop, which is the limit of two processes
that wake each other, and an echo of a message over our ZeroMQ channel, without a kvstore. An echo's
messages are as long as the question and the answer. Both sides use uvloop, as all services do.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.nodes import kvstore_nodes, metadata_server, record_of
from halfmoon_metadata import open_store
from halfmoon_protocol.codec import encode
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksLeased,
    KvstoreAddress,
    LeaseBlocks,
    Message,
    WorkerInfo,
)
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreClients

LAYOUT = KvLayout(
    model="bench", n_layers=2, n_kv_heads=8, head_dim=64, dtype="float32", block_size=16
)
HASHES = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(1, 65))
#: Exchanges of one kind before the next kind's turn, and before those that count.
BATCH, WARM_UP = 250, 500

#: The highest median that is wanted, in µs.
GOALS = {"question of 1": 150.0, "question of 64": 250.0}

#: Asks once, and returns when the answer is here.
Ask = Callable[[], Awaitable[object]]


def run(console: Console, n_rounds: int = 12) -> None:
    """Measure all kinds in turn, round after round, and print medians."""
    with (
        tempfile.TemporaryDirectory() as folder,
        metadata_server() as url,
        kvstore_nodes(Path(folder), url, {"node": {"capacity-mib": 64}}) as nodes,
        _child(_serve_tcp) as (tcp_pid, tcp_port),
        _child(_serve_channel) as (channel_pid, channel_port),
    ):
        store = open_store(url)
        figures = uvloop.run(
            _measure(
                record_of(store, "node"),
                nodes[0].pid,
                (tcp_pid, tcp_port),
                (channel_pid, channel_port),
                n_rounds,
            )
        )
        store.close()
    table = Table(
        title=f"A question to a kvstore, µs; medians of {n_rounds} rounds of {BATCH}", box=None
    )
    columns = (
        "median",
        "p90",
        "CPU here",
        "CPU there",
        "CPU sum",
        "to TCP",
        "goal",
        "goal : median",
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    limits = {n: figures[f"TCP echo of {n}"][0] for n in (1, 64)}
    for name, (median, p90, ours, theirs) in figures.items():
        limit = limits[64 if name.endswith("64") else 1]
        row = (median, p90, ours, theirs, ours + theirs)
        goal = GOALS.get(name)
        to_goal = ("", "") if goal is None else (f"{goal:.0f}", f"{goal / median:.2f}")
        table.add_row(name, *(f"{value:.0f}" for value in row), f"{median / limit:.1f}×", *to_goal)
    console.print(table)


async def _measure(
    node: WorkerInfo,
    node_pid: int,
    tcp: tuple[int, int],
    channel: tuple[int, int],
    n_rounds: int,
) -> dict[str, tuple[float, float, float, float]]:
    """Return median, 90th percentile and processor time of both sides, by kind, in µs."""
    network = ZmqNetwork()
    clients = KvstoreClients(network, 10.0)
    client = await clients.client_for(
        KvstoreAddress(node.worker_id, node.generation, node.commands)
    )
    await _put(client)
    async with _tcp_echo(tcp[1]) as echo:
        link = await network.dial(f"tcp://127.0.0.1:{channel[1]}")

        async def send_and_receive(message: Message) -> object:
            await link.send(message)
            return await link.receive()

        kinds: dict[str, tuple[int, Ask]] = {}
        for n in (1, 64):
            hashes = HASHES[:n]
            lease = await client.lease(LAYOUT, hashes)
            assert len(lease.places) == n, "a block is missing"
            await client.release(lease.ticket)
            kinds[f"TCP echo of {n}"] = (tcp[0], echo(_question(hashes), lease))
            kinds[f"channel echo of {n}"] = (
                channel[0],
                partial(send_and_receive, _question(hashes)),
            )
            kinds[f"question of {n}"] = (node_pid, partial(_ask, client, hashes))
        times: defaultdict[str, list[float]] = defaultdict(list)
        ours: defaultdict[str, list[float]] = defaultdict(list)
        theirs: defaultdict[str, list[float]] = defaultdict(list)
        for _, ask in kinds.values():
            for _ in range(WARM_UP):
                await ask()
        for _ in range(n_rounds):
            for name, (pid, ask) in kinds.items():
                other_s, own_s = _processor_s(pid), time.process_time()
                for _ in range(BATCH):
                    began = time.perf_counter()
                    await ask()
                    times[name].append(time.perf_counter() - began)
                ours[name].append((time.process_time() - own_s) / BATCH)
                theirs[name].append((_processor_s(pid) - other_s) / BATCH)
    await clients.close()
    await network.close()
    return {
        name: (
            1e6 * statistics.median(times[name]),
            1e6 * statistics.quantiles(times[name], n=10)[-1],
            1e6 * statistics.median(ours[name]),
            1e6 * statistics.median(theirs[name]),
        )
        for name in kinds
    }


def _question(hashes: tuple[BlockHash, ...]) -> LeaseBlocks:
    return LeaseBlocks(ticket=Ticket("12345"), layout=LAYOUT, hashes=hashes)


async def _put(client: KvstoreClient) -> None:
    """Store the blocks; their bytes do not matter here."""
    n_tokens = len(HASHES) * LAYOUT.block_size
    reserved = await client.reserve(LAYOUT, HASHES, None, (0,) * n_tokens)
    await client.commit(reserved.ticket, (0,) * len(reserved.places))


async def _ask(client: KvstoreClient, hashes: tuple[BlockHash, ...]) -> BlocksLeased:
    """Take a lease and let it go; letting go is not answered."""
    lease = await client.lease(LAYOUT, hashes)
    await client.release(lease.ticket)
    return lease


def _processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


# Echoes.


@contextmanager
def _child(serve: Callable[[Connection], None]) -> Iterator[tuple[int, int]]:
    """Run an echo server as a process, and yield its process id and TCP port."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    process.kill()
    process.join()


class _TcpEcho(asyncio.Protocol):
    """Answer each request, of a length of 4 bytes, that of the answer and padding."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._transport.write(bytes(int.from_bytes(data[:4], "big")))


def _serve_tcp(pipe: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_TcpEcho, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def _serve_channel(pipe: Connection) -> None:
    async def serve() -> None:
        port = await ZmqNetwork().bind("echo")
        pipe.send(int(port.commands.rpartition(":")[2]))
        while True:
            await port.send(*await port.receive())

    uvloop.run(serve())


class _TcpCaller(asyncio.Protocol):
    """Complete a future when as many bytes have come as were asked for."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] | None = None
        self.n_missing = 0

    def data_received(self, data: bytes) -> None:
        self.n_missing -= len(data)
        if self.answered is not None and not self.n_missing:
            self.answered.set_result(None)


@asynccontextmanager
async def _tcp_echo(port: int) -> AsyncIterator[Callable[[Message, Message], Ask]]:
    """Yield a function that makes exchanges as long as a question and its answer."""
    loop = asyncio.get_running_loop()
    transport, caller = await loop.create_connection(_TcpCaller, "127.0.0.1", port)

    def echo(question: Message, answer: Message) -> Ask:
        n_question, n_answer = len(encode(question)), len(encode(answer))
        request = n_answer.to_bytes(4, "big") + bytes(n_question - 4)

        async def ask() -> None:
            caller.n_missing, caller.answered = n_answer, loop.create_future()
            transport.write(request)
            await caller.answered

        return ask

    yield echo
    transport.close()
