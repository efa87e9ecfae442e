"""Re-check blocks that a reader reported as corrupt, and evict those whose checksum is wrong.

A client that stalls until its reservation has ended, and then writes, damages a block. The node
does not notice that, as transfers are one-sided; the block's readers do, and report it
(`VerifyBlocks`). The node does not trust the report: it verifies the bytes itself.
"""

import asyncio
from collections.abc import Iterable

import structlog
import xxhash

from halfmoon_kvstore.block_store import BlockStore
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_runtime.clock import Clock

log = structlog.get_logger()

#: Most blocks that wait for a check; further reports are dropped, and will be repeated.
MAX_REPORTED = 1024
#: Blocks checked per call: all their bytes are read.
_BATCH_BLOCKS = 16
#: Owner of leases on blocks under check; no client has this name.
_OWNER = "suspects"


class BlockScrubber:
    """Queue reported blocks and check them; leased blocks wait until no lease is left."""

    def __init__(self, block_store: BlockStore, clock: Clock) -> None:
        self._block_store = block_store
        self._clock = clock
        #: In the order of their last check.
        self._waiting: dict[BlockHash, None] = {}

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """Queue blocks that a reader reported as damaged."""
        for block in hashes:
            if len(self._waiting) < MAX_REPORTED:
                self._waiting[block] = None

    async def scrub(self) -> None:
        """Check some blocks and evict the damaged ones; the caller runs the tiers' commands."""
        for block in list(self._waiting)[:_BATCH_BLOCKS]:
            del self._waiting[block]
            if await self._is_damaged(block) and not self._given_up(block):
                self._waiting[block] = None

    async def _is_damaged(self, block: BlockHash) -> bool:
        """Return whether a block's bytes in memory are corrupt; blocks on disk are not checked."""
        tiers, layout = self._block_store.tiers, self._block_store.layout
        if tiers is None or layout is None or (stored := tiers.memory.get(block)) is None:
            return False
        ticket, size = Ticket(block.hex()), layout.block_bytes
        view = self._block_store.memory.view[stored.slot * size : (stored.slot + 1) * size]
        tiers.memory.add_to_lease(_OWNER, ticket, block, self._clock.now(), float("inf"))
        try:
            checksum = await asyncio.to_thread(xxhash.xxh3_64_intdigest, view)
        finally:
            tiers.memory.release(_OWNER, ticket)
        return bool(checksum != stored.checksum)

    def _given_up(self, block: BlockHash) -> bool:
        tiers = self._block_store.tiers
        if tiers is None or not tiers.discard_damaged(block, self._clock.now()):
            return False
        log.warning("damaged_block_evicted", block=block.hex())
        return True
