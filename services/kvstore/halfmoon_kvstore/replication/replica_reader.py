"""Read blocks of other kvstores into this one's memory, for a conductor's copy order.

One order runs at a time: copies must not slow down readers and writers, which share the network.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import xxhash

from halfmoon_protocol.messages import BlocksLeased, Place, ReplicateBlocks
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Corrupted, Piece
from halfmoon_transfer.regions.region_table import Memory

#: Seconds in which one order's bytes must be read; the lease is held meanwhile.
_READ_S = 60.0


class ReplicaReader:
    """Read from any kvstore into one memory."""

    def __init__(self, kvstores: KvstoreClients, transfer: TransferEngine, memory: Memory) -> None:
        self._kvstores = kvstores
        self._transfer = transfer
        self._memory = memory
        self._copy_lock = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """True while a copy is running."""
        return self._copy_lock.locked()

    @asynccontextmanager
    async def leased(self, order: ReplicateBlocks) -> AsyncIterator[BlocksLeased]:
        """Lease an order's blocks at their source, as many as it has, for a `with` block.

        Raises:
            KvstoreUnavailable: the source can't be reached, or refuses.
        """
        async with self._copy_lock:
            source = await self._kvstores.client_for(order.source)
            lease = await source.lease(order.layout, order.hashes)
            async with source.hold_lease(lease):
                try:
                    yield lease
                except Corrupted:
                    await source.report_damaged(order.hashes)
                    raise

    async def read(
        self, lease: BlocksLeased, wanted: Sequence[tuple[Place, int]], block_bytes: int
    ) -> list[int]:
        """Read leased blocks to places in our memory, and verify them.

        Args:
            lease: a lease on the blocks, which the caller keeps.
            wanted: each block's place at the source, and its offset in our memory.
            block_bytes: size of each block.

        Returns:
            The checksums of the blocks.

        Raises:
            TransferError: the blocks could not be read in time, or are corrupt.
        """
        pieces = [
            Piece(self._memory.region, at, lease.region, place.offset, block_bytes)
            for place, at in wanted
        ]
        # The blocks' own checksums, verified below, cover the way from the source's memory.
        await self._transfer.submit("read", pieces, deadline_s=_READ_S, checksums=False)
        return await asyncio.to_thread(self._verify, wanted, block_bytes)

    def _verify(self, wanted: Sequence[tuple[Place, int]], block_bytes: int) -> list[int]:
        for place, at in wanted:
            view = self._memory.view[at : at + block_bytes]
            if xxhash.xxh3_64_intdigest(view) != place.checksum:
                raise Corrupted(f"block {place.hash.hex()} is not what was put")
        return [place.checksum for place, _ in wanted]
