"""Write captured blocks to their kvstores: reserve, write, commit.

Blocks of one kvstore go one group after the other, so that a prefix is there before what follows
it. What fails is not stored, and the request does not depend on it.
"""

import asyncio
import logging
import time
from collections import defaultdict

import xxhash

from halfmoon_prefix_cache.prefix_fetch import cancel_and_wait
from halfmoon_prefix_cache.write_settling import settle_writes
from halfmoon_protocol.messages import BlocksReserved, KvstoreAddress
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreUnavailable
from halfmoon_transfer.interface import Piece, TransferError
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.pool_connection import PoolConnection
from halfmoon_vllm.step_capture import CapturedBlocks

log = logging.getLogger("vllm.halfmoon")

#: Part of a reservation's time in which its blocks are written.
_WRITE_SHARE = 0.5


class BlockStorer:
    """Stores of all requests, in one event loop."""

    def __init__(self, pool: PoolConnection, counts: ConnectorCounts, tenant: str) -> None:
        """Use open connections; blocks count against this tenant's quota."""
        self._pool = pool
        self._tenant = tenant
        self._turns: defaultdict[KvstoreAddress, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: Reasons of kvstores that were logged, each once.
        self._logged: set[tuple[KvstoreAddress, str]] = set()
        self._counts = counts

    async def store(self, blocks: CapturedBlocks) -> None:
        """Store blocks, and free their staging pages."""
        began_s = time.monotonic()
        try:
            async with self._turns[blocks.home]:
                n_stored = await self._store(blocks)
        except (KvstoreUnavailable, TransferError) as error:
            self._pool.replicas.on_error(blocks.home, error)
            self._counts.add("blocks_not_stored", len(blocks.hashes), "kvstore")
            self._log_once(blocks.home, str(error))
        else:
            self._counts.add("blocks_stored", n_stored)
            self._counts.add("bytes_stored", n_stored * self._pool.staging.layout.block_bytes)
            self._counts.add("store_seconds", time.monotonic() - began_s)
        finally:
            self._pool.staging.give_back(list(blocks.pages))

    async def _store(self, blocks: CapturedBlocks) -> int:
        """Return how many blocks were written; the others are stored there already."""
        layout = self._pool.staging.layout
        kvstore = await self._pool.replicas.client(blocks.home)
        reserved = await kvstore.reserve(
            layout, blocks.hashes, blocks.parent, blocks.token_ids, self._tenant
        )
        if reserved.not_stored:
            self._counts.add("blocks_not_stored", len(reserved.not_stored), "not_reserved")
        if not reserved.places:
            await kvstore.revoke(reserved.ticket)
            self._pool.replicas.answered(blocks.home)
            return 0
        try:
            await self._write(kvstore, reserved, blocks)
        except BaseException:
            # Otherwise it runs out: bytes may be on their way to places that are others' then.
            if await settle_writes(self._pool.transfer, reserved.region):
                await kvstore.revoke(reserved.ticket)
            raise
        self._pool.replicas.answered(blocks.home)
        return len(reserved.places)

    async def _write(
        self, kvstore: KvstoreClient, reserved: BlocksReserved, blocks: CapturedBlocks
    ) -> None:
        size, memory = self._pool.staging.layout.block_bytes, self._pool.staging.memory
        page_of = dict(zip(blocks.hashes, blocks.pages, strict=True))
        pages = [page_of[place.hash] for place in reserved.places]
        pieces = [
            Piece(memory.region, page * size, reserved.region, place.offset, size)
            for page, place in zip(pages, reserved.places, strict=True)
        ]
        transfer = self._pool.transfer.submit(
            "write", pieces, deadline_s=max(0.001, _WRITE_SHARE * reserved.expires_s)
        )
        try:
            await transfer
        finally:
            await cancel_and_wait([transfer])  # nothing may read the pages any more

        def checksums() -> tuple[int, ...]:
            view = memory.view
            return tuple(
                xxhash.xxh3_64_intdigest(view[page * size : (page + 1) * size]) for page in pages
            )

        await kvstore.commit(reserved.ticket, await asyncio.to_thread(checksums))

    def _log_once(self, home: KvstoreAddress, reason: str) -> None:
        if (home, reason) not in self._logged and len(self._logged) < 1000:
            self._logged.add((home, reason))
            log.warning("blocks not stored at kvstore %s: %s", home.worker_id, reason)
