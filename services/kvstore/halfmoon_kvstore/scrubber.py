"""Blocks of which a reader says that their bytes in memory are damaged: looked at, and given up.

Who reads by one-sided transfer sees what the node does not: a client that wakes up after its
reservation has ended, and writes, leaves a block that everybody finds damaged and nobody can use.
A reader that does says so (`VerifyBlocks`). It is not believed: the node looks for itself.
"""

import asyncio
from collections.abc import Iterable

import structlog
import xxhash

from halfmoon_kvstore.block_store import BlockStore
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_runtime.clock import Clock

log = structlog.get_logger()

#: Blocks that wait to be looked at; what is reported beyond is forgotten, and reported again.
MAX_REPORTED = 1024
#: Blocks looked at in one go: their bytes are read from end to end.
_AT_ONCE = 16
#: The owner of leases on what is looked at; no client has this name.
_OWNER = "suspects"


class BlockScrubber:
    """Blocks to look at; those in use wait until nobody reads them any more."""

    def __init__(self, stock: BlockStore, clock: Clock) -> None:
        self._stock = stock
        self._clock = clock
        #: In the order in which they were last looked at.
        self._waiting: dict[BlockHash, None] = {}

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """Somebody found these damaged."""
        for block in hashes:
            if len(self._waiting) < MAX_REPORTED:
                self._waiting[block] = None

    async def scrub(self) -> None:
        """Look at some, and give up those that are damaged; what the tiers want is not heeded."""
        for block in list(self._waiting)[:_AT_ONCE]:
            del self._waiting[block]
            if await self._is_damaged(block) and not self._given_up(block):
                self._waiting[block] = None

    async def _is_damaged(self, block: BlockHash) -> bool:
        """Whether a block's bytes in memory are not what was put; on the disk is not memory."""
        tiers, layout = self._stock.tiers, self._stock.layout
        if tiers is None or layout is None or (stored := tiers.memory.get(block)) is None:
            return False
        ticket, size = Ticket(block.hex()), layout.block_bytes
        view = self._stock.memory.view[stored.slot * size : (stored.slot + 1) * size]
        tiers.memory.add_to_lease(_OWNER, ticket, block, self._clock.now(), float("inf"))
        try:
            checksum = await asyncio.to_thread(xxhash.xxh3_64_intdigest, view)
        finally:
            tiers.memory.release(_OWNER, ticket)
        return bool(checksum != stored.checksum)

    def _given_up(self, block: BlockHash) -> bool:
        tiers = self._stock.tiers
        if tiers is None or not tiers.discard_damaged(block, self._clock.now()):
            return False
        log.warning("damaged_block_given_up", block=block.hex())
        return True
