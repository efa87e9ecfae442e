"""Fetch a request's cached blocks under a lease, and keep its new ones for reuse.

All of it is optional: without a kvstore everything is computed and nothing is kept. What is
fetched is never trusted before `verify`.
"""

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

from halfmoon_prefix_cache.arriving_checksums import ArrivingChecksums
from halfmoon_prefix_cache.block_put import BlockPutter, BlockRun
from halfmoon_prefix_cache.layer_groups import layer_groups
from halfmoon_prefix_cache.prefix_fetch import PrefixFetch
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Transfer, TransferError
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.prefill.prefill_job import PrefillJob

log = structlog.get_logger()

#: Leases and reservations are renewed no more often than this, however short a kvstore makes them.
_RENEW_S = 0.05


class CorruptBlock(Exception):
    """A fetched block's bytes are not those that were stored."""


class PrefixCacheClient:
    """Fetches, verifies and keeps blocks, between the kvstores and this worker's pool."""

    def __init__(
        self,
        replicas: ReplicaSelector,
        transfer: TransferEngine,
        memory: PoolMemory,
        layout: KvLayout,
        clock: Clock,
        *,
        patience_s: float,
        checksum_thread: Executor | None = None,
    ) -> None:
        self._replicas = replicas
        self._transfer = transfer
        self._memory = memory
        self._layout = layout
        self._clock = clock
        self._patience_s = patience_s
        self._putter = BlockPutter(replicas, transfer, memory, layout)
        self._checksum_thread = checksum_thread or ThreadPoolExecutor(
            1, thread_name_prefix="checksums"
        )

    def close(self) -> None:
        """End the thread; no block is verified any more."""
        self._checksum_thread.shutdown(cancel_futures=True)

    async def fetch(self, job: PrefillJob, n_blocks: int) -> None:
        """Lease the job's cached prefix and start reading it, layer by layer.

        Args:
            job: has pages; gets `lease`, `loads` and `n_cached` if some replica has blocks.
            n_blocks: blocks to have at the most; those in its pages already are not leased.
        """
        cached, n_held = job.start.cached, job.n_held_in_place
        assert cached is not None, "nothing is cached of this prompt"
        job.n_cached = n_held * self._layout.block_size
        hashes = job.start.block_hashes[n_held:n_blocks]
        if not hashes:
            return
        job.fetching_since_s = self._clock.now()
        sources = [cached.kvstore, *cached.replicas]
        job.lease = await self._replicas.lease(sources, hashes, job.start.trace)
        job.leased_s = began_s = self._clock.now()
        if job.lease is None:
            self._replicas.reads["none"] += 1
            return
        job.holds.set()
        job.n_cached += len(job.lease.places) * self._layout.block_size

        def submit(layers: range) -> Transfer:
            return self._transfer.submit(
                "read",
                job.load_pieces(self._memory.region, self._layout, layers),
                deadline_s=max(job.write_until_s - self._clock.now(), 0.001),
                checksums=False,  # `verify` compares the blocks' own
            )

        async def take_over(error: TransferError, n_here: int) -> bool:
            return await self._take_over(job, error, n_here)

        n_layer_bytes = len(job.lease.places) * self._layout.layer_bytes
        groups = layer_groups(self._layout.n_layers, n_layer_bytes)
        read = PrefixFetch(groups, submit, take_over, self._patience_s)
        job.loads = read.layers
        pages = job.pages[n_held : n_held + len(job.lease.places)]
        sums = ArrivingChecksums(self._memory.view, self._layout, pages, self._checksum_thread)
        for load in job.loads:
            load.add_done_callback(sums.on_layer)
        job.checksums = sums
        job.loads[-1].add_done_callback(
            lambda _: setattr(job, "fetch_s", self._clock.now() - began_s)
        )

    async def _take_over(self, job: PrefillJob, error: TransferError, n_here: int) -> bool:
        """Lease the blocks that are being read at another replica; return whether one has them."""
        failed, cached = job.lease, job.start.cached
        assert failed is not None and cached is not None, "blocks are read without a lease"
        self._replicas.failed(failed.address, error)
        hashes = tuple(place.hash for place in failed.places)
        job.failed_sources.add(failed.address)
        sources = (cached.kvstore, *cached.replicas)
        others = [address for address in sources if address not in job.failed_sources]
        lease = await self._replicas.lease(others, hashes, job.start.trace)
        if lease is None:
            return False
        fits = len(lease.places) == len(hashes)
        if not fits or (n_here and lease.checksums != failed.checksums):
            await lease.kvstore.release(lease.ticket)
            return False
        log.info(
            "another_replica_read",
            request_id=job.request_id,
            kvstore=lease.address.worker_id,
            instead_of=failed.address.worker_id,
            n_layers_here=n_here,
        )
        job.lease = lease
        await failed.kvstore.release(failed.ticket)
        return True

    async def renew_until_cancelled(self, job: PrefillJob) -> None:
        """Renew the job's lease and its reservation, whenever it has one.

        A long prompt, or a long queue before it, outlasts a lease. Room that has run out may be
        another worker's by the time that the job writes to it.
        """
        while True:
            await job.holds.wait()
            holds = [hold for hold in (job.lease, job.put) if hold is not None]
            if not holds:
                job.holds.clear()
                continue
            # What comes meanwhile is younger, and lasts longer than a lease.
            await asyncio.sleep(max(_RENEW_S, min(hold.expires_s for hold in holds) / 3))
            for hold in (job.lease, job.put):
                if hold is not None:
                    await hold.kvstore.renew(hold.ticket)

    async def make_room(self, job: PrefillJob, first: int) -> bool:
        """Reserve room at the home kvstore for the blocks from `first` on.

        Returns:
            Whether there is room; the job has `put` then.
        """
        start, size = job.start, self._layout.block_size
        assert start.store_in is not None, "no kvstore is to keep the blocks of this prompt"
        hashes = start.block_hashes[first:]
        if job.put is not None:  # for fewer blocks, in the hope of a longer cached prefix
            await job.put.kvstore.revoke(job.put.ticket)
            job.put = None
        try:
            run = BlockRun(
                hashes,
                start.block_hashes[first - 1] if first else None,
                start.token_ids[first * size : len(start.block_hashes) * size],
                start.tenant,
                first,
            )
            job.put = await self._putter.reserve(start.store_in, run)
        except KvstoreUnavailable as error:
            self._replicas.on_error(start.store_in, error)
            log.info("blocks_not_stored", request_id=job.request_id, reason=str(error))
            return False
        job.holds.set()
        return True

    async def verify(self, job: PrefillJob) -> None:
        """Check the fetched blocks; all reads are over.

        Raises:
            CorruptBlock: some block is not what was stored.
        """
        if job.lease is None:
            return
        lease, cached, sums = job.lease, job.start.cached, job.checksums
        assert cached is not None and sums is not None, "a lease without a cached prefix"
        found = await sums
        pairs = zip(lease.places, found, strict=True)
        if damaged := tuple(place.hash for place, sum_ in pairs if sum_ != place.checksum):
            bad = CorruptBlock(
                f"{len(damaged)} blocks of {lease.kvstore.name} are not what was stored"
            )
            self._replicas.failed(lease.address, bad)
            await lease.kvstore.report_damaged(damaged)
            raise bad
        self._replicas.answered(lease.address)
        self._replicas.reads["first" if lease.address == cached.kvstore else "another"] += 1
        self._replicas.blocks["disk"] += lease.n_from_disk
        self._replicas.blocks["memory"] += len(lease.places) - lease.n_from_disk
        job.fetched_from, job.n_from_disk = lease.address.worker_id, lease.n_from_disk

    async def keep(self, job: PrefillJob) -> None:
        """Commit the new blocks once they are written; the request does not depend on it."""
        put = job.put
        if put is None:
            return
        try:
            for write in job.put_writes:
                await write
            written = [job.pages[block] for block in sorted(put.offsets)]
            await self._putter.commit(put, written)
            job.put = None
        except (TransferError, KvstoreUnavailable) as error:
            self._replicas.on_error(put.address, error)
            log.info("blocks_not_stored", request_id=job.request_id, reason=str(error))

    async def give_back(self, job: PrefillJob) -> None:
        """Let go of what is still held; no transfer of the job may be under way."""
        await self.release_lease(job)
        if job.put is not None:
            await self._putter.give_up(job.put)
            job.put = None

    async def release_lease(self, job: PrefillJob) -> None:
        """Let go of the blocks that were fetched, if there are any."""
        if job.lease is not None:
            await job.lease.kvstore.release(job.lease.ticket)
            job.lease = None
