"""Connections on which nothing comes for longer than the stall timeout.

Of Python's loop: that of the extension waits in C, where no timeout comes back to be handled.
"""

import asyncio
import json

import pytest

from halfmoon_conform.peers.transfer_connection import TransferConnection
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import ClusterKey, TransferEngine, TransferSettings
from halfmoon_transfer.backends.socket_io import ReadAhead

SIZE = 4096
KEY = "the moon is made of green cheese"


@pytest.mark.parametrize("cluster_key", ["", KEY])
async def test_a_write_is_applied_once_however_long_its_connection_idles_after_it(
    cluster_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[None] = []
    wait = ReadAhead.wait

    def counted(ahead: ReadAhead) -> bool:
        try:
            return wait(ahead)
        except BlockingIOError:
            timeouts.append(None)
            raise

    monkeypatch.setattr(ReadAhead, "wait", counted)
    store = MemoryStore()
    settings = TransferSettings(
        stall_timeout_s=0.05,
        native=False,
        cluster_key=ClusterKey(cluster_key) if cluster_key else None,
    )
    with TransferEngine.open(
        "there", metadata=store, backends=("tcp",), settings=settings
    ) as there:
        memory = there.allocate(SIZE)
        address = json.loads(store.get("halfmoon/segments/there") or b"")["endpoints"]["tcp"]
        region = {"segment": "there", "generation": memory.region.generation,
                  "key": memory.region.key}  # fmt: skip
        connection = await TransferConnection.open(
            address["address"], "there", memory.region.generation, cluster_key=cluster_key
        )
        assert await connection.write_bytes(region, [(0, b"a" * SIZE)]) == [0]
        memory.view[:] = b"b" * SIZE  # it is another's now
        before = len(timeouts)
        async with asyncio.timeout(20):
            while len(timeouts) < before + 3:
                await asyncio.sleep(0.01)
        assert bytes(memory.view) == b"b" * SIZE
        assert await connection.write_bytes(region, [(0, b"c" * SIZE)]) == [0]
        assert bytes(memory.view) == b"c" * SIZE
        await connection.close()
