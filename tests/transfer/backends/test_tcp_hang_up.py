"""Connections that are cut with what the network holds of them."""

import json

import pytest

from halfmoon_conform.peers.transfer_connection import HungUp, TransferConnection
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import TransferEngine
from halfmoon_transfer.interface import Piece

SIZE = 4096


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
