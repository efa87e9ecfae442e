"""Connections that idle for longer than the stall timeout, and ones that are cut while idle."""

import asyncio
from typing import Any

import pytest

from halfmoon_conform.peers.transfer_connection import HungUp, TransferConnection
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import ClusterKey, Memory, TransferEngine, TransferSettings
from halfmoon_transfer.backends.socket_io import ReadAhead
from tests.transfer.conftest import Ends

SIZE = 4096
KEY = "the moon is made of green cheese"


async def opened(there: TransferEngine, memory: Memory, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A connection of the conformance kit's own to an engine, and a region as it names one."""
    region = memory.region
    address = there.descriptor.endpoints["tcp"].address
    connection = await TransferConnection.open(address, "there", region.generation, **more)
    return connection, {"segment": "there", "generation": region.generation, "key": region.key}


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
    settings = TransferSettings(
        stall_timeout_s=0.05,
        # The loop of the extension waits in C, where no timeout comes back to be handled.
        native=False,
        cluster_key=ClusterKey(cluster_key) if cluster_key else None,
    )
    with TransferEngine.open(
        "there", metadata=MemoryStore(), backends=("tcp",), settings=settings
    ) as there:
        memory = there.allocate(SIZE)
        connection, region = await opened(there, memory, cluster_key=cluster_key)
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


async def test_what_was_sent_over_a_connection_that_is_cut_does_not_land(make_world: Any) -> None:
    ends = Ends(make_world("tcp"), SIZE)
    ends.here.transfer("write", [ends.piece])
    # This one is idle, as the owner sees it: its write is still in the network.
    late, region = await opened(ends.there, ends.remote)
    assert await late.write_bytes(region, [(0, b"a" * SIZE)]) == [0]
    ends.there.cut_connections()
    with pytest.raises((HungUp, OSError)):
        await late.write_bytes(region, [(0, b"late" * (SIZE // 4))])
    await late.close()
    assert bytes(ends.remote.view) == b"a" * SIZE
    # Who goes on opens another.
    ends.local.view[:] = b"b" * SIZE
    ends.here.transfer("write", [ends.piece])
    assert bytes(ends.remote.view) == b"b" * SIZE
