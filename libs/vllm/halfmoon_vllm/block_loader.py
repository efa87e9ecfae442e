"""Read a request's blocks from kvstores into vLLM's cache.

    lease ──▶ layers 0…k of all blocks here ──▶ copied into vLLM's cache ──▶ … ──▶ checksums

A request is computed only after the last step, so bytes that prove wrong are in a cache that
nothing has read; vLLM computes those blocks again. A lease is renewed while its blocks are read,
and released after that. If a kvstore fails, the next one that holds the blocks is asked.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from halfmoon_prefix_cache.arriving_checksums import ArrivingChecksums
from halfmoon_prefix_cache.kvstore_lease import KvstoreLease
from halfmoon_prefix_cache.layer_groups import layer_groups
from halfmoon_prefix_cache.prefix_fetch import PrefixFetch, cancel_and_wait
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_transfer.interface import Piece, Transfer, TransferError
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.pool_connection import PoolConnection
from halfmoon_vllm.step_orders import LoadOrder

log = logging.getLogger("vllm.halfmoon")

#: Seconds between two looks for free staging pages.
_PAGES_POLL_S = 0.005

#: Write rows of one layer into vLLM's cache: layer, keys, values, slots.
CacheWriter = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class _CorruptBlocks(Exception):
    """Blocks whose bytes are not those that were stored; those before them are good."""

    def __init__(self, n_good: int, n_bad: int) -> None:
        super().__init__(f"{n_bad} blocks are not what was stored")
        self.n_good = n_good


class BlockLoader:
    """Loads of all requests, in one event loop."""

    def __init__(
        self,
        pool: PoolConnection,
        write_cache: CacheWriter,
        counts: ConnectorCounts,
        *,
        read_s: float,
        load_timeout_s: float,
    ) -> None:
        """Use open connections.

        Args:
            pool: the connections.
            write_cache: called in a thread of this object.
            counts: what is loaded is added to these.
            read_s: seconds to wait for the next layers.
            load_timeout_s: seconds for one request, all in all.
        """
        self._pool = pool
        self._layout: KvLayout = pool.staging.layout
        self._write_cache = write_cache
        self._read_s = read_s
        self._load_timeout_s = load_timeout_s
        self._copies = ThreadPoolExecutor(1, "halfmoon-copies")
        self._checksums = ThreadPoolExecutor(1, "halfmoon-checksums")
        self._counts = counts

    def close(self) -> None:
        """End the threads, once nothing writes to vLLM's cache."""
        self._copies.shutdown(cancel_futures=True)
        self._checksums.shutdown(cancel_futures=True)

    async def load(self, order: LoadOrder) -> int:
        """Load an order's blocks; return how many of them, from the first, are in the cache."""
        began_s = time.monotonic()
        deadline_s = began_s + self._load_timeout_s
        sources, n_loaded = list(order.sources), 0
        while n_loaded < len(order.hashes) and time.monotonic() < deadline_s:
            lease = await self._lease(sources, order, n_loaded, deadline_s)
            if lease is None:
                break
            sources.remove(lease.address)
            async with lease.kvstore.hold_lease(lease):
                n_loaded += await self._read(lease, order, n_loaded, deadline_s)
        self._counts.add("blocks_loaded", n_loaded)
        self._counts.add("blocks_not_loaded", len(order.hashes) - n_loaded)
        self._counts.add("bytes_loaded", n_loaded * self._layout.block_bytes)
        self._counts.add("load_seconds", time.monotonic() - began_s)
        return n_loaded

    async def _lease(
        self, sources: list[KvstoreAddress], order: LoadOrder, first: int, deadline_s: float
    ) -> KvstoreLease | None:
        """Lease the blocks from `first` on, at the source that has most of them."""
        try:
            # A lease that comes later is released by its client, or runs out.
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await self._pool.replicas.lease(sources, order.hashes[first:])
        except TimeoutError:
            return None

    async def _read(
        self, lease: KvstoreLease, order: LoadOrder, first: int, deadline_s: float
    ) -> int:
        """Read leased blocks, as many at a time as there are staging pages; return how many."""
        n_read, replicas = 0, self._pool.replicas
        try:
            while n_read < len(lease.places):
                pages = await self._take_pages(len(lease.places) - n_read, deadline_s)
                if not pages:
                    return n_read
                places = order.places[first + n_read : first + n_read + len(pages)]
                try:
                    await self._read_pages(lease, n_read, places, pages, deadline_s)
                finally:
                    self._pool.staging.give_back(pages)
                n_read += len(pages)
        except _CorruptBlocks as error:
            n_read += error.n_good
            self._counts.add("blocks_corrupt", 1)
            replicas.failed(lease.address, error)
        except TransferError as error:
            replicas.failed(lease.address, error)
        else:
            replicas.answered(lease.address)
        return n_read

    async def _take_pages(self, most: int, deadline_s: float) -> list[int]:
        """Take staging pages, at least one unless none is free before the deadline."""
        while not (pages := self._pool.staging.take_for_load(most)):
            if time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(_PAGES_POLL_S)
        return pages

    async def _read_pages(
        self,
        lease: KvstoreLease,
        first: int,
        places: Sequence[int],
        pages: list[int],
        deadline_s: float,
    ) -> None:
        layout, memory = self._layout, self._pool.staging.memory
        leased = lease.places[first : first + len(pages)]

        def submit(layers: range) -> Transfer:
            shift = layers.start * layout.layer_bytes
            length = len(layers) * layout.layer_bytes
            return self._pool.transfer.submit(
                "read",
                [
                    Piece(
                        memory.region,
                        page * layout.block_bytes + shift,
                        lease.region,
                        place.offset + shift,
                        length,
                    )
                    for page, place in zip(pages, leased, strict=True)
                ],
                deadline_s=max(deadline_s - time.monotonic(), 0.001),
                checksums=False,  # the blocks' own are compared
            )

        groups = layer_groups(layout.n_layers, len(pages) * layout.layer_bytes)
        patience_s = max(0.001, min(self._read_s, deadline_s - time.monotonic()))
        fetch = PrefixFetch(groups, submit, _no_other, patience_s)
        sums = ArrivingChecksums(memory.view, layout, pages, self._checksums)
        for layer in fetch.layers:
            layer.add_done_callback(sums.on_layer)
        slots, rows = self._slots_and_rows(places, pages)
        copying: asyncio.Future[None] | None = None
        try:
            for group in groups:
                await fetch.layers[group[-1]]
                if copying is not None:
                    await copying
                copying = asyncio.get_running_loop().run_in_executor(
                    self._copies, self._copy, group, slots, rows
                )
            assert copying is not None, "a model has layers"
            await copying
            found = await sums
        finally:
            await cancel_and_wait(fetch.layers)
            if copying is not None:
                await asyncio.wait([copying])
        good = [sum_ == place.checksum for sum_, place in zip(found, leased, strict=True)]
        if not all(good):
            bad = tuple(p.hash for p, right in zip(leased, good, strict=True) if not right)
            log.error(
                "%d blocks of kvstore %s are not what was stored: computed instead",
                len(bad),
                lease.address.worker_id,
            )
            await lease.kvstore.report_damaged(bad)
            raise _CorruptBlocks(good.index(False), len(bad))

    def _slots_and_rows(
        self, places: Sequence[int], pages: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks' slots in vLLM's cache, and their rows in staging memory."""
        within = torch.arange(self._layout.block_size)
        slots = torch.tensor(places)[:, None] * self._layout.block_size + within
        rows = self._pool.staging.base_rows(torch.tensor(pages)[:, None], within)
        return slots.reshape(-1), rows.reshape(-1)

    def _copy(self, layers: range, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy layers of blocks into vLLM's cache; in the thread for copies."""
        with torch.inference_mode():
            for layer in layers:
                keys, values = self._pool.staging.rows.read(layer, rows)
                self._write_cache(layer, keys, values, slots)


async def _no_other(_error: Any, _n_here: int) -> bool:
    """Let no other replica take over in the middle: `BlockLoader.load` asks it for the rest."""
    return False
