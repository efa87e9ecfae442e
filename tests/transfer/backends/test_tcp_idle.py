"""Connections on which nothing comes for longer than the stall timeout."""

import asyncio
import json

import pytest

from halfmoon_conform.peers.transfer_connection import TransferConnection
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import ClusterKey, TransferEngine, TransferSettings
from halfmoon_transfer.backends.tcp import native

SIZE = 4096
KEY = "the moon is made of green cheese"


@pytest.mark.parametrize("cluster_key", ["", KEY])
@pytest.mark.parametrize(
    "is_native",
    [False, pytest.param(True, marks=pytest.mark.skipif(bool(native.missing), reason="no C"))],
)
async def test_a_write_is_applied_once_however_long_its_connection_idles_after_it(
    cluster_key: str, is_native: bool
) -> None:
    store = MemoryStore()
    settings = TransferSettings(
        stall_timeout_s=0.05,
        native=is_native,
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
        await asyncio.sleep(0.3)
        assert bytes(memory.view) == b"b" * SIZE
        assert await connection.write_bytes(region, [(0, b"c" * SIZE)]) == [0]
        assert bytes(memory.view) == b"c" * SIZE
        await connection.close()
