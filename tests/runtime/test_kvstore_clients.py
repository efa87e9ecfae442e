"""The clients of kvstores that a process keeps: what has gone down is dialled anew."""

import asyncio

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreClients


async def close_slowly(client: KvstoreClient) -> None:
    """Close as a link over a network does: others run meanwhile."""
    await asyncio.sleep(0)
    client._reader.cancel()
    await client._link.close()


async def test_two_are_dialled_at_once_after_others_went_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each dial clears clients that are down away: the other must not miss them."""
    network = MemoryNetwork()
    addresses = {}
    for number in range(8):
        port = await network.bind(f"kvstore-{number}")
        addresses[number] = KvstoreAddress(WorkerId(f"kvstore-{number}"), 1, port.commands)
    clients = KvstoreClients(network, timeout_s=5.0)
    monkeypatch.setattr(KvstoreClient, "close", close_slowly)
    down = [await clients.client_for(addresses[number]) for number in range(6)]
    for number in range(6):
        network.kill(f"kvstore-{number}")
    while any(client.alive for client in down):
        await asyncio.sleep(0)
    dialled = await asyncio.gather(*(clients.client_for(addresses[n]) for n in (6, 7)))
    assert [client.name for client in dialled] == ["kvstore-6", "kvstore-7"]
    assert all(client.alive for client in dialled)
    await clients.close()
