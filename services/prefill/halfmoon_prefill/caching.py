"""A request's dealings with kvstores: blocks fetched under a lease, new ones kept for reuse.

All of it is optional: without a kvstore everything is computed and nothing is kept. What is
fetched is never trusted before `verify`.
"""

import asyncio
from collections.abc import Sequence

import structlog
import xxhash

from halfmoon_prefill.job import Job, Lease, Put
from halfmoon_protocol.layout import KvLayout
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstores import Kvstores, KvstoreUnavailable
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import TransferError
from halfmoon_transfer.regions import Memory

log = structlog.get_logger()


class BadBlock(Exception):
    """A fetched block's bytes are not those that were stored."""


class Caching:
    """Fetches, verifies and keeps blocks, between the kvstores and this worker's pool."""

    def __init__(
        self,
        kvstores: Kvstores,
        transfer: TransferEngine,
        memory: Memory,
        layout: KvLayout,
        clock: Clock,
    ) -> None:
        self._kvstores = kvstores
        self._transfer = transfer
        self._memory = memory
        self._layout = layout
        self._clock = clock

    async def fetch(self, job: Job, most_tokens: int) -> None:
        """Lease the job's cached prefix and start reading it, layer by layer.

        Args:
            job: holds its pages; gets `lease`, `loads` and `n_cached` if there is something.
            most_tokens: no more than these may come from a cache.
        """
        cached = job.start.cached
        if cached is None:
            return
        n_blocks = min(cached.n_blocks, most_tokens // self._layout.block_size)
        hashes = job.start.block_hashes[:n_blocks]
        if not hashes:
            return
        try:
            kvstore = await self._kvstores.at(cached.kvstore)
            leased = await kvstore.lease(self._layout, hashes)
        except KvstoreUnavailable as error:
            log.info("cache_not_used", request_id=job.request_id, reason=str(error))
            return
        if not leased.places:
            return
        job.lease = Lease(kvstore, leased.ticket, leased.region, leased.places, leased.expires_s)
        job.n_cached = len(leased.places) * self._layout.block_size
        began_s = self._clock.now()
        job.loads = [
            self._transfer.submit(
                "read",
                job.load_pieces(self._memory.region, self._layout, layer),
                deadline_s=max(job.write_until_s - began_s, 0.001),
            )
            for layer in range(self._layout.n_layers)
        ]
        job.loads[-1].add_done_callback(
            lambda _: setattr(job, "fetch_s", self._clock.now() - began_s)
        )

    async def renew(self, job: Job) -> None:
        """Keep the lease of a read that is still running."""
        if job.lease is not None:
            await job.lease.kvstore.renew(job.lease.ticket)

    async def make_room(self, job: Job) -> None:
        """Reserve room at the home kvstore for the blocks that it may not have."""
        start = job.start
        if start.store_in is None or not start.block_hashes:
            return
        size = self._layout.block_size
        is_home = start.cached is not None and start.cached.kvstore == start.store_in
        first = job.n_cached // size if is_home else 0
        hashes = start.block_hashes[first:]
        if not hashes:
            return
        try:
            kvstore = await self._kvstores.at(start.store_in)
            reserved = await kvstore.reserve(
                self._layout,
                hashes,
                start.block_hashes[first - 1] if first else None,
                start.token_ids[first * size : len(start.block_hashes) * size],
            )
        except KvstoreUnavailable as error:
            log.info("blocks_not_kept", request_id=job.request_id, reason=str(error))
            return
        index = {block: i for i, block in enumerate(start.block_hashes)}
        offsets = {index[place.hash]: place.offset for place in reserved.places}
        job.put = Put(kvstore, reserved.ticket, reserved.region, offsets)

    async def verify(self, job: Job) -> None:
        """All reads are over: check what came, and end the lease.

        Raises:
            BadBlock: some block is not what was stored.
        """
        if job.lease is None:
            return
        wanted = tuple(place.checksum for place in job.lease.places)
        if await self._checksums(job.pages[: len(wanted)]) != wanted:
            raise BadBlock(f"a block from {job.lease.kvstore.name} is not what was stored there")
        await self._release(job)

    async def keep(self, job: Job) -> None:
        """Commit the new blocks once they are written; the request does not depend on it."""
        put = job.put
        if put is None:
            return
        try:
            for write in job.put_writes:
                await write
            written = [job.pages[block] for block in sorted(put.offsets)]
            await put.kvstore.commit(put.ticket, await self._checksums(written))
            job.put = None
        except (TransferError, KvstoreUnavailable) as error:
            log.info("blocks_not_kept", request_id=job.request_id, reason=str(error))

    async def give_back(self, job: Job) -> None:
        """Let go of what is still held; no transfer of the job may be under way."""
        await self._release(job)
        if job.put is not None:
            await job.put.kvstore.revoke(job.put.ticket)
            job.put = None

    async def _release(self, job: Job) -> None:
        if job.lease is not None:
            await job.lease.kvstore.release(job.lease.ticket)
            job.lease = None

    async def _checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        """xxh3-64 of each page, in a thread: it reads all their bytes."""
        size = self._layout.block_bytes
        view = self._memory.view

        def compute() -> tuple[int, ...]:
            return tuple(
                xxhash.xxh3_64_intdigest(view[page * size : (page + 1) * size]) for page in pages
            )

        return await asyncio.to_thread(compute)
