"""Decide in vLLM's scheduler which blocks a request loads, and which it stores.

    lookup ──▶ on_allocated ──▶ build_orders (load) ──▶ … on_loads_over
                                     │
                   each step ────────┴──▶ build_orders (store): blocks that begin in the step

Nothing here waits: the index answers lookups at once. Only blocks of prompts are stored, as
Halfmoon's prefill workers do.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_protocol.salts import salt_of
from halfmoon_vllm.cache_layout import CacheLayout
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.step_orders import LoadOrder, StepOrders, StoreOrder


class BlockDirectory(Protocol):
    """Tell where blocks are, as far as is known."""

    def holders(self, hashes: Sequence[BlockHash]) -> list[tuple[KvstoreAddress, int]]:
        """Return holders of the first block, those of the longest prefix first."""
        ...

    def home_for(self, first: BlockHash, preferred: str) -> KvstoreAddress | None:
        """Return the kvstore for new blocks of prompts that begin with this block."""
        ...


@dataclass(frozen=True)
class RequestPart:
    """Describe what one step computes of one request."""

    request_id: str
    #: Blocks of vLLM's cache that the request has from its start, or since the last step.
    vllm_blocks: Sequence[int]
    #: Whether `vllm_blocks` are all blocks of the request.
    from_start: bool
    #: Positions that the step computes.
    start: int
    stop: int


@dataclass
class _Tracked:
    """A request between its arrival and its end."""

    token_ids: tuple[int, ...]
    #: Of the prompt's full blocks.
    hashes: list[BlockHash]
    vllm_blocks: list[int] = field(default_factory=list)
    #: Blocks before this one are stored, ordered to be stored, or given up.
    n_ordered: int = 0
    home: KvstoreAddress | None = None
    #: Tokens that vLLM had in its own cache at the last lookup.
    n_computed: int = 0
    #: Kvstores of the last lookup, best first.
    sources: tuple[KvstoreAddress, ...] = ()
    #: Whether blocks did not come: they are not asked for again.
    load_failed: bool = False
    counted: bool = False


class SchedulerSide:
    """The state of all requests, on the scheduler's side of the connector."""

    def __init__(
        self,
        cache: CacheLayout,
        directory: BlockDirectory,
        *,
        tenant: str = "",
        home: str = "",
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        """Start without requests.

        Args:
            cache: the server's cache and the pool's blocks.
            directory: where blocks are.
            tenant: part of all salts; empty: none.
            home: name of the kvstore for new blocks; empty: by the prompt.
            loads: whether blocks are looked up.
            stores: whether new blocks are stored.
        """
        self._layout = cache.layout
        self._cache = cache
        self._directory = directory
        self._tenant = tenant
        self._home = home
        self._may_load = loads
        self._may_store = stores
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        #: Blocks of vLLM's that are being loaded, by request.
        self._loading: dict[str, set[int]] = {}
        self.counts = ConnectorCounts()

    def on_request(self, request_id: str, prompt: Sequence[int], cache_salt: str | None) -> None:
        """Take note of a request whose prompt is plain tokens; a second call changes nothing."""
        if request_id in self._requests:
            return
        hashes = block_hashes(
            prompt,
            model=self._layout.model,
            salt=salt_of(self._tenant, cache_salt or ""),
            block_size=self._layout.block_size,
        )
        self._requests[request_id] = _Tracked(tuple(prompt), hashes)

    def lookup(self, request_id: str, n_computed: int) -> int:
        """Return how many tokens after `n_computed` can be loaded: whole blocks of vLLM's.

        At least the prompt's last token is left to compute.
        """
        request = self._requests.get(request_id)
        if request is None or request.load_failed or not self._may_load:
            return 0
        vllm_block, block_size = self._cache.vllm_block_size, self._layout.block_size
        most = (len(request.token_ids) - 1) // vllm_block * vllm_block
        if most <= n_computed or n_computed % vllm_block:
            return 0
        wanted = request.hashes[n_computed // block_size : most // block_size]
        found = self._directory.holders(wanted)
        n_found = found[0][1] if found else 0
        if not request.counted:
            request.counted = True
            self.counts.add("blocks_looked_up", len(wanted))
            self.counts.add("blocks_found", n_found)
        request.n_computed = n_computed
        request.sources = tuple(address for address, _ in found)
        return n_found * block_size // vllm_block * vllm_block

    def on_allocated(self, request_id: str, vllm_blocks: Sequence[int], n_external: int) -> None:
        """Order the load of `n_external` tokens, after those that were computed at the lookup.

        Args:
            request_id: of a request that was looked up.
            vllm_blocks: all of its blocks.
            n_external: tokens to load, a multiple of vLLM's block size.
        """
        request = self._requests[request_id]
        n_computed = request.n_computed
        loaded = vllm_blocks[n_computed // self._cache.vllm_block_size :]
        self._loading[request_id] = set(loaded[: n_external // self._cache.vllm_block_size])
        first = n_computed // self._layout.block_size
        last = (n_computed + n_external) // self._layout.block_size
        self._loads.append(
            LoadOrder(
                request_id,
                tuple(request.hashes[first:last]),
                tuple(self._place(vllm_blocks, block) for block in range(first, last)),
                request.sources,
            )
        )

    def on_loads_over(self, over: Iterable[str], failed_blocks: AbstractSet[int]) -> None:
        """Take note of loads that are over; where blocks did not come, look none up again."""
        for request_id in over:
            blocks = self._loading.pop(request_id, set())
            request = self._requests.get(request_id)
            if request is not None and blocks & failed_blocks:
                request.load_failed = True

    def on_finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def build_orders(self, parts: Sequence[RequestPart], dropped: Sequence[str]) -> StepOrders:
        """Return the orders of a step.

        Args:
            parts: what the step computes.
            dropped: requests that ended or were preempted since the last step.
        """
        for request_id in dropped:
            if (request := self._requests.get(request_id)) is not None:  # preempted
                request.vllm_blocks, request.n_ordered = [], 0
        stores = [order for part in parts if (order := self._store_order(part)) is not None]
        loads, self._loads = self._loads, []
        return StepOrders(tuple(loads), tuple(stores), tuple(dropped), bool(parts))

    def _store_order(self, part: RequestPart) -> StoreOrder | None:
        request = self._requests.get(part.request_id)
        if request is None or not self._may_store:
            return None
        if part.from_start:
            request.vllm_blocks = list(part.vllm_blocks)
        else:
            request.vllm_blocks += part.vllm_blocks
        size, hashes = self._layout.block_size, request.hashes
        first = max(request.n_ordered, -(-part.start // size))
        last = min(-(-part.stop // size), len(hashes))
        if first >= last:
            return None
        request.n_ordered = last
        holders = self._directory.holders(hashes)
        n_known = holders[0][1] if holders else 0
        first = max(first, min(n_known, last))
        if first >= last:
            return None
        if request.home is None:
            # With the prefix, since a lease is of blocks of one kvstore.
            chosen = self._directory.home_for(hashes[0], self._home)
            having = [address for address, n in holders if n == n_known]
            request.home = chosen if chosen in having or not having else having[0]
        if request.home is None:
            self.counts.add("blocks_not_stored", last - first, "no_kvstore")
            return None
        return StoreOrder(
            part.request_id,
            tuple(hashes[first:last]),
            hashes[first - 1] if first else None,
            request.token_ids[first * size : last * size],
            tuple(self._place(request.vllm_blocks, block) for block in range(first, last)),
            request.home,
        )

    def _place(self, vllm_blocks: Sequence[int], block: int) -> int:
        """Return where a block of the prompt is in vLLM's cache, in blocks of the pool's size."""
        whole, part = divmod(block, self._cache.per_vllm_block)
        return vllm_blocks[whole] * self._cache.per_vllm_block + part
