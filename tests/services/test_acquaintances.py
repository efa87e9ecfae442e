"""Prefill workers know their peers before they need them."""

import asyncio

from halfmoon_metadata import MemoryStore, MetadataUnreachable
from halfmoon_prefill.acquaintances import keep_acquainted
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, WorkerInfo
from halfmoon_runtime.membership import Membership
from halfmoon_transfer import Piece, TransferEngine

OWN, PEER = WorkerId("prefill-0"), WorkerId("decode-0")


class ShakyStore(MemoryStore):
    """A store that can be away, and counts looks at all records."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.n_looks = 0

    def get(self, key: str) -> bytes | None:
        if self.away:
            raise MetadataUnreachable("away")
        return super().get(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        self.n_looks += 1
        if self.away:
            raise MetadataUnreachable("away")
        return super().list(prefix)

    async def looked_at(self) -> None:
        """Until somebody has begun a look and ended it."""
        n_looks = self.n_looks
        async with asyncio.timeout(60):
            while self.n_looks < n_looks + 2:
                await asyncio.sleep(0.005)


def decode_worker(generation: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=PEER,
        role="decode",
        generation=generation,
        host="here",
        commands="mem://decode-0",
        events="mem://decode-0",
        layout=KvLayout(
            model="tiny", n_layers=1, n_kv_heads=1, head_dim=1, dtype="float32", block_size=1
        ),
        model="tiny",
        max_context=16,
        n_blocks=1,
        decode_cost=DecodeCost(),
    )


async def test_a_peer_that_was_never_written_to_is_reached_while_the_metadata_server_is_away() -> (
    None
):
    store = ShakyStore()
    with TransferEngine.open(OWN, metadata=store, backends=("memory",)) as transfer:
        mine = transfer.allocate(4)
        mine.view[:] = b"moon"
        knowing = asyncio.create_task(keep_acquainted(store, transfer, OWN, look_s=0.01))
        await store.looked_at()
        with TransferEngine.open(PEER, metadata=store, backends=("memory",)) as peer:
            theirs = peer.allocate(4)
            await Membership(store, decode_worker(peer.generation)).join()
            await store.looked_at()
            store.away = True
            await store.looked_at()
            written = transfer.submit("write", [Piece(mine.region, 0, theirs.region, 0, 4)], 60)
            await asyncio.to_thread(written.result, 60)
            assert bytes(theirs.view) == b"moon"
            store.away = False
        knowing.cancel()
        await asyncio.wait({knowing})
