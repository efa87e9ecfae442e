"""Under which circumstances a worker starts under a name that is in the metadata server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Hello, WorkerInfo
from halfmoon_runtime.channels.network import Port
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.name_check import WorkerNameTaken, check_name
from tests.runtime.service_parts import info_of

NAME = WorkerId("kvstore-0")
KEY = "the moon is made of green cheese"


@pytest.fixture
async def network() -> AsyncIterator[ZmqNetwork]:
    one = ZmqNetwork(cluster_key=KEY)
    yield one
    await one.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def write(store: MemoryStore, port: Port, **fields: Any) -> WorkerInfo:
    """Write the record of a worker that has, or had, this port."""
    reach = {"commands": port.commands, "events": port.events, "key_id": port.key_id}
    info = info_of(NAME, **{"generation": 3, **reach, **fields})
    store.put(MEMBERS + NAME, msgspec.json.encode(info))
    return info


@asynccontextmanager
async def living(info: WorkerInfo, port: Port) -> AsyncIterator[None]:
    """A worker that answers hellos with its record."""
    conductors = ConductorConnections(port, lambda _: None)

    async def serve() -> None:
        while True:
            peer, message = await port.receive()
            assert isinstance(message, Hello)
            await conductors.on_hello(message, peer, info)
            if info.worker_id == NAME:  # a start under its own name is no conductor
                assert not conductors.owners.conductors

    task = asyncio.create_task(serve())
    try:
        yield
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()


async def test_a_worker_that_lives_elsewhere_keeps_its_name(
    network: ZmqNetwork, store: MemoryStore
) -> None:
    port = await network.bind(NAME)
    await check_name(store, network, NAME)  # without a record it is free
    async with living(write(store, port), port):
        with pytest.raises(WorkerNameTaken) as refused:
            await check_name(store, network, NAME, answer_s=60)
    text = str(refused.value)
    assert "\n" not in text
    for part in (NAME, "generation 3", port.commands, "--worker-id", "--cluster NAME"):
        assert part in text


async def test_the_name_of_a_dead_worker_is_free(network: ZmqNetwork, store: MemoryStore) -> None:
    port = await network.bind(NAME)
    await port.close()
    write(store, port)
    async with asyncio.timeout(60):  # it does not wait for the lease, nor for an answer
        await check_name(store, network, NAME, answer_s=600)


async def test_a_leaving_worker_gives_its_name_away(
    network: ZmqNetwork, store: MemoryStore
) -> None:
    port = await network.bind(NAME)
    async with living(write(store, port, draining=True), port):
        await check_name(store, network, NAME, answer_s=60)


async def test_another_at_its_address_keeps_no_name(
    network: ZmqNetwork, store: MemoryStore
) -> None:
    port = await network.bind("decode-0")
    there = msgspec.structs.replace(write(store, port), worker_id=WorkerId("decode-0"))
    async with living(there, port):
        await check_name(store, network, NAME, answer_s=0.3)


async def test_a_hanging_worker_keeps_no_name(network: ZmqNetwork, store: MemoryStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # accepts, and says nothing
        port = await network.bind(NAME)
        await port.close()
        write(store, port, commands=f"tcp://127.0.0.1:{hanging.getsockname()[1]}")
        await check_name(store, network, NAME, answer_s=0.3)
