"""Messages that are meant for another kind of service: dropped, counted, and harmless."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.ids import ConductorId, Ticket, WorkerId
from halfmoon_protocol.messages import (
    Hello,
    KvstoreAddress,
    Message,
    StartPrefill,
    ToConductor,
    ToDecode,
    ToFurtherStage,
    ToKvstore,
    ToKvstoreClient,
    ToPrefill,
    Welcome,
)
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.kvstore_clients import KvstoreClients
from tests.services.asking import (
    dial,
    n_failed,
    prompt_of,
)

LocalCluster = Callable[..., Any]
PROMPT = prompt_of(40)


def n_dropped() -> float:
    """Return how many messages were dropped because their receiver does not take them."""
    labels = {"reason": "unexpected"}
    return REGISTRY.get_sample_value("halfmoon_dropped_messages_total", labels) or 0.0


def others(union: Any) -> list[Message]:
    """Return an example of each message that is not in a union."""
    return [message for message in EXAMPLES if not isinstance(message, union)]


@pytest.mark.parametrize(
    ("worker", "union"),
    [("prefill-0", ToPrefill | ToFurtherStage), ("decode-0", ToDecode), ("kvstore-0", ToKvstore)],
)
async def test_a_worker_drops_and_counts_messages_for_other_receivers(
    local_cluster: LocalCluster, worker: str, union: Any
) -> None:
    misdirected = others(union)
    async with local_cluster() as cluster:
        dropped, failed = n_dropped(), n_failed()
        caller = await dial(cluster, worker)
        await caller.send(*misdirected, Hello(conductor_id=ConductorId("c"), session=1))
        (welcome,) = await caller.wait_for(Welcome)  # messages keep their order: all were read
        assert welcome.worker == cluster.worker(worker).info
        assert n_dropped() == dropped + len(misdirected)
        assert n_failed() == failed
        assert await cluster.generate(PROMPT, 4)
        await caller.close()


async def test_a_decode_worker_without_local_prefill_drops_a_start_of_prefill(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        dropped, failed = n_dropped(), n_failed()
        caller = await dial(cluster, "decode-0")
        start = next(one for one in EXAMPLES if isinstance(one, StartPrefill))
        await caller.send(start, Hello(conductor_id=ConductorId("c"), session=1))
        await caller.wait_for(Welcome)
        assert (n_dropped(), n_failed()) == (dropped + 1, failed)
        await caller.close()


async def test_a_conductor_drops_and_counts_messages_for_other_receivers(
    local_cluster: LocalCluster,
) -> None:
    misdirected = others(ToConductor)
    async with local_cluster() as cluster:
        dropped, failed = n_dropped(), n_failed()
        worker = cluster.worker("decode-0")
        (peer,) = worker.conductors.owners.conductors
        for message in misdirected:
            await worker.port.send(peer, message)
        await cluster.until(lambda: n_dropped() == dropped + len(misdirected))
        assert await cluster.generate(PROMPT, 4)
        assert n_failed() == failed


async def test_a_client_of_a_kvstore_drops_and_counts_messages_for_other_receivers() -> None:
    network = MemoryNetwork()
    port = await network.bind("kvstore-0")
    clients = KvstoreClients(network, timeout_s=30.0)
    client = await clients.client_for(KvstoreAddress(WorkerId("kvstore-0"), 1, port.commands))
    await client.release(Ticket("t"))
    peer, _ = await port.receive()
    dropped, misdirected = n_dropped(), others(ToKvstoreClient)
    for message in misdirected:
        await port.send(peer, message)
    async with asyncio.timeout(30):
        while n_dropped() < dropped + len(misdirected):
            await asyncio.sleep(0.005)
    assert client.alive
    await clients.close()
    await network.close()
