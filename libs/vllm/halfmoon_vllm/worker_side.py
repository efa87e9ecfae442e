"""Perform the orders of each step in vLLM's worker: capture, store and load blocks.

thread of vLLM's worker            thread of the pool
begin_step: open blocks   ────────▶ loads
layers:     copy rows
end_step:   captured      ────────▶ stores
take_loads  ◀─────────────────────── loads that are over, with the blocks that did not come
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from halfmoon_vllm.block_loader import BlockLoader
from halfmoon_vllm.block_storer import BlockStorer
from halfmoon_vllm.cache_layout import CacheLayout
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.connector_settings import ConnectorRefused, ConnectorSettings
from halfmoon_vllm.layer_tap import CacheUpdate, tap_layers
from halfmoon_vllm.load_results import LoadResults
from halfmoon_vllm.loop_thread import LoopThread
from halfmoon_vllm.pool_connection import open_pool
from halfmoon_vllm.step_capture import CapturedBlocks, StepCapture
from halfmoon_vllm.step_orders import LoadOrder, StepOrders

log = logging.getLogger("vllm.halfmoon")

#: Seconds that a step without tokens to compute waits for a load. Without it vLLM asks again and
#: again, on the cores that the load needs. A request that arrives waits for it.
_IDLE_WAIT_S = 0.002


class WorkerSide:
    """One worker's blocks on their way between its cache and the pool."""

    def __init__(
        self, settings: ConnectorSettings, cache: CacheLayout, layers: Sequence[Any]
    ) -> None:
        """Tap the layers, in the order of the model, and connect to the pool in a thread."""
        if settings.staging_mib << 20 < cache.layout.block_bytes:
            raise ConnectorRefused(
                f"staging_mib is {settings.staging_mib}: not one block of "
                f"{cache.layout.block_bytes} bytes fits"
            )
        self._settings = settings
        self._cache = cache
        self._layers = layers
        self._updates = tap_layers(layers, self._on_update)
        self._in_step = False
        self._computes = True
        self.counts = ConnectorCounts()
        #: All None until the pool is connected, and again when it is closed.
        self._capture: StepCapture | None = None
        self._loader: BlockLoader | None = None
        self._storer: BlockStorer | None = None
        self._loads = LoadResults()
        self._thread = LoopThread("halfmoon-pool", self._serve_pool)

    # -- in the worker's thread ----------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """Open blocks to store, and start loads."""
        self._in_step = True
        self._computes = orders.computes
        if self._capture is not None:
            self._capture.begin_step(orders.stores, orders.dropped)
        else:
            n_blocks = sum(len(order.hashes) for order in orders.stores)
            self.counts.add("blocks_not_stored", n_blocks, "not_connected")
        for order in orders.loads:
            self._start_load(order)

    def end_step(self) -> None:
        """Hand captured blocks to the thread of the pool."""
        if not self._in_step:
            return
        self._in_step = False
        if self._capture is None:
            return
        for blocks in self._capture.end_step():
            self._thread.submit(self._store(blocks))

    def take_loads(self) -> tuple[set[str], set[int]]:
        """Take the requests whose load is over, and the blocks that did not come.

        A step that computes nothing waits a little for the first of them.
        """
        return self._loads.take(0.0 if self._computes else _IDLE_WAIT_S)

    def close(self) -> None:
        """Disconnect from the pool."""
        self._thread.close()

    def _start_load(self, order: LoadOrder) -> None:
        self._loads.begin()
        if self._loader is None:
            self._on_loaded(order, 0)
        else:
            self._thread.submit(self._load(self._loader, order))

    def _on_update(
        self,
        index: int,
        update: CacheUpdate,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        update(layer, key, value, kv_cache, slots)
        if self._in_step and self._capture is not None:
            self._capture.on_layer(index, key, value, slots)

    def _write_cache(
        self, index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write rows into a layer's cache; in the loader's thread."""
        layer = self._layers[index]
        device = layer.kv_cache.device
        keys, values, slots = keys.to(device), values.to(device), slots.to(device)
        self._updates[index](layer, keys, values, layer.kv_cache, slots)

    # -- in the pool's thread ------------------------------------------------------------------

    async def _serve_pool(self) -> None:
        settings = self._settings
        async with open_pool(settings, self._cache.layout) as pool:
            self._storer = BlockStorer(pool, self.counts, settings.tenant)
            self._loader = loader = BlockLoader(
                pool,
                self._write_cache,
                self.counts,
                read_s=settings.kvstore_read_s,
                load_timeout_s=settings.load_timeout_s,
            )
            self._capture = StepCapture(pool.staging, self._cache.layout.n_layers, self.counts)
            log.info(
                "connected to the pool: %d staging pages, layout %s",
                pool.staging.n_pages,
                self._cache.layout,
            )
            try:
                await asyncio.Event().wait()
            finally:
                self._capture = self._loader = self._storer = None
                loader.close()

    async def _load(self, loader: BlockLoader, order: LoadOrder) -> None:
        n_loaded = 0
        try:
            n_loaded = await loader.load(order)
        except Exception:
            log.exception("blocks of request %s were not loaded", order.request_id)
        finally:
            self._on_loaded(order, n_loaded)

    async def _store(self, blocks: CapturedBlocks) -> None:
        try:
            if self._storer is not None:
                await self._storer.store(blocks)
        except Exception:
            log.exception("blocks were not stored")

    def _on_loaded(self, order: LoadOrder, n_loaded: int) -> None:
        per_block = self._cache.per_vllm_block
        failed = (place // per_block for place in order.places[n_loaded:])
        self._loads.finish(order.request_id, failed)
