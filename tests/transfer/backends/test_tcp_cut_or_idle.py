"""Connections that are cut with what the network holds of them, or on which nothing comes."""

import asyncio
import json

import pytest

from halfmoon_conform.peers.transfer_connection import HungUp, TransferConnection
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import ClusterKey, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.backends.socket_io import ReadAhead

SIZE = 4096
KEY = "the moon is made of green cheese"


async def test_what_was_sent_over_a_connection_that_is_cut_does_not_land() -> None:
    store = MemoryStore()
    with (
        TransferEngine.open("here", metadata=store, backends=("tcp",)) as here,
        TransferEngine.open("there", metadata=store, backends=("tcp",)) as there,
    ):
        ours, theirs = here.allocate(SIZE), there.allocate(SIZE)
        ours.view[:] = b"a" * SIZE
        piece = Piece(ours.region, 0, theirs.region, 0, SIZE)
        here.transfer("write", [piece])
        # This one is idle, as the owner sees it: its write is still in the network.
        record = json.loads(store.get("halfmoon/segments/there") or b"")
        address = record["endpoints"]["tcp"]["address"]
        region = {"segment": "there", "generation": theirs.region.generation,
                  "key": theirs.region.key}  # fmt: skip
        late = await TransferConnection.open(address, "there", theirs.region.generation)
        assert await late.write_bytes(region, [(0, b"a" * SIZE)]) == [0]
        there.cut_connections()
        with pytest.raises((HungUp, OSError)):
            await late.write_bytes(region, [(0, b"late" * (SIZE // 4))])
        await late.close()
        assert bytes(theirs.view) == b"a" * SIZE
        # Who goes on opens another.
        ours.view[:] = b"b" * SIZE
        here.transfer("write", [piece])
        assert bytes(theirs.view) == b"b" * SIZE


@pytest.mark.parametrize("cluster_key", ["", KEY])
async def test_a_write_is_applied_once_however_long_its_connection_idles_after_it(
    cluster_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Python's loop: the extension waits in C, where no timeout comes back to be handled."""
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
