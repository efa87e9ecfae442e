"""Ours: a kvstore node, and a client of it; the first argument says how bytes come.

tcp, shm: read into the client's memory, and verified there by the blocks' checksums, which cover
the wire too; twice: the same over TCP with the wire's own checksums beside them. view: looked at
where they are, in memory that both have mapped, and verified. unverified: looked at, and only that.
"""

import itertools
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
import xxhash
from clock import CAPACITY, MIB, ROOM, batch_of, measure

from benchmarks.nodes import kvstore_nodes, metadata_server, record_of
from halfmoon_metadata import MetadataStore, open_store
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksLeased, KvstoreAddress, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreClients
from halfmoon_transfer import Piece, TransferEngine


def layout_of(size: int) -> KvLayout:
    """Blocks of this size: 16 tokens, and as many layers of 4 KiB as it takes."""
    return KvLayout(
        model="m", n_layers=size // 4096, n_kv_heads=1, head_dim=32, dtype="float32", block_size=16
    )


class Client:
    """One client of one node, with blocks of one size."""

    def __init__(self, way: str, store: KvstoreClient, transfer: TransferEngine, size: int) -> None:
        self.way, self.store, self.transfer, self.size = way, store, transfer, size
        self.layout = layout_of(size)
        self.room = transfer.allocate(ROOM)
        self.room.view[:] = bytes(range(256)) * (ROOM // 256)
        self.views = [self.room.view[i * size : (i + 1) * size] for i in range(batch_of(size))]
        self.names = itertools.count()
        #: Blocks that are there to be got.
        self.known: tuple[BlockHash, ...] = ()

    async def warm(self) -> None:
        """Write all of the node's memory once: the kernel gives pages when they are touched."""
        for _ in range(CAPACITY // (len(self.views) * self.size) + 1):
            await self.put(len(self.views))

    async def put(self, n_blocks: int) -> float:
        hashes = tuple(BlockHash(next(self.names).to_bytes(16, "little")) for _ in range(n_blocks))
        started = time.perf_counter()
        room = await self.store.reserve(self.layout, hashes, None, (0,) * 16 * n_blocks)
        assert len(room.places) == n_blocks, "the node has no room"
        pieces = [
            Piece(self.room.region, i * self.size, room.region, place.offset, self.size)
            for i, place in enumerate(room.places)
        ]
        checksums = [xxhash.xxh3_64_intdigest(view) for view in self.views[:n_blocks]]
        await self.transfer.submit("write", pieces)
        await self.store.commit(room.ticket, tuple(checksums))
        return time.perf_counter() - started

    async def get(self, n_blocks: int) -> float:
        await self.have()
        started = time.perf_counter()
        lease = await self.lease(n_blocks)
        if self.way in ("view", "unverified"):
            views = [
                self.transfer.view(lease.region, place.offset, self.size) for place in lease.places
            ]
            assert all(view is not None for view in views), "nothing is mapped"
        else:
            views = self.views[:n_blocks]
            pieces = [
                Piece(self.room.region, i * self.size, lease.region, place.offset, self.size)
                for i, place in enumerate(lease.places)
            ]
            await self.transfer.submit("read", pieces, checksums=self.way == "twice")
        if self.way != "unverified":
            for view, place in zip(views, lease.places, strict=True):
                assert xxhash.xxh3_64_intdigest(view) == place.checksum, "wrong bytes"
        await self.store.release(lease.ticket)
        return time.perf_counter() - started

    async def exists(self, n_blocks: int) -> float:
        await self.have()
        started = time.perf_counter()
        lease = await self.lease(n_blocks)
        await self.store.release(lease.ticket)
        return time.perf_counter() - started

    async def have(self) -> None:
        if not self.known:
            first = next(self.names) + 1
            await self.put(batch_of(self.size))
            self.known = tuple(
                BlockHash(i.to_bytes(16, "little")) for i in range(first, next(self.names))
            )

    async def lease(self, n_blocks: int) -> BlocksLeased:
        lease = await self.store.lease(self.layout, self.known[:n_blocks])
        assert len(lease.places) == n_blocks, "a block is missing"
        return lease


async def connect(
    stack: AsyncExitStack, way: str, metadata: MetadataStore, info: WorkerInfo, size: int
) -> Client:
    network = ZmqNetwork()
    stack.push_async_callback(network.close)
    stores = KvstoreClients(network, 10.0)
    stack.push_async_callback(stores.close)
    backend = "tcp" if way in ("tcp", "twice") else "shm"
    transfer = TransferEngine.open(
        "client", metadata=metadata, backends=(backend,), host_id=info.host
    )
    stack.callback(transfer.close)
    address = KvstoreAddress(
        worker_id=info.worker_id, generation=info.generation, commands=info.commands
    )
    return Client(way, await stores.client_for(address), transfer, size)


def main() -> None:
    way = sys.argv[1]
    ops = ["put", "get", "exists"] if way in ("tcp", "shm") else ["get"]
    loop = uvloop.new_event_loop()  # as in all services
    for size in sys.argv[2].split(","):
        flags = {"capacity-mib": CAPACITY // MIB}
        with (
            tempfile.TemporaryDirectory() as folder,
            metadata_server() as url,
            kvstore_nodes(Path(folder), url, {"node": flags}),
        ):
            metadata = open_store(url)
            stack = AsyncExitStack()
            connecting = connect(stack, way, metadata, record_of(metadata, "node"), int(size))
            client = loop.run_until_complete(connecting)
            loop.run_until_complete(client.warm())

            def run(op: str, size: int, n_blocks: int, client: Client = client) -> float:
                return loop.run_until_complete(getattr(client, op)(n_blocks))

            sys.argv[-2] = size
            measure(run, ops)
            loop.run_until_complete(stack.aclose())
            metadata.close()


main()
