"""Hold what is known of a server's cache, and publish each change of it.

    requests, events of the server ──▶ what is held ──▶ changes in order ──run──▶ conductors

The blocks of a request count as cached from its start. A server computes prompts in the order in
which they come, so the blocks are there when it begins with a later prompt. It evicts no block of
a request that runs. A moment after its end only the server's own events count.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksSnapshot, KvstoreLoad, SnapshotBlocks
from halfmoon_protocol.snapshots import snapshot_pages
from halfmoon_runtime.channels.network import Port
from halfmoon_servers.bridge.held_blocks import HeldBlocks
from halfmoon_servers.bridge.recent_blocks import RecentBlocks

#: Seconds after a request's end in which the server's events of its blocks arrive.
_EVENTS_S = 1.0


class CacheView:
    """One server's cached blocks, as a kvstore whose blocks the server alone reads."""

    def __init__(self, port: Port, layout: KvLayout, n_blocks: int, n_caches: int) -> None:
        """Start empty.

        Args:
            port: publishes the changes.
            layout: with the model's fingerprint and the block size.
            n_blocks: blocks of the server's cache.
            n_caches: caches that publish KV events, one for each rank; 0: the content is guessed.
        """
        self._port = port
        self._layout = layout
        self._n_blocks = n_blocks
        #: The server's caches, and one of the blocks of requests that are there.
        self._held = HeldBlocks(max(1, n_caches) + 1)
        self._of_requests = max(1, n_caches)
        self._requests: dict[RequestId, tuple[BlockHash, ...]] = {}
        #: Blocks of requests that are over, and until when they count.
        self._over: deque[tuple[float, tuple[BlockHash, ...]]] = deque()
        #: How many of all these requests use each block.
        self._users: Counter[BlockHash] = Counter()
        self._recent = None if n_caches else RecentBlocks(n_blocks, layout.block_size)
        self._sequence = -1
        #: Not yet published.
        self._changes: asyncio.Queue[KvEvent] = asyncio.Queue()
        #: Tokens that requests were said to find cached, by this view and by the server.
        self.n_expected_tokens = 0
        self.n_reported_tokens = 0

    @property
    def is_guessed(self) -> bool:
        """True when the server publishes no KV events."""
        return self._recent is not None

    def n_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt the server has, as far as is known."""
        return self._held.n_leading(hashes)

    async def run(self) -> None:
        """Publish changes, one at a time: each fits a message, all of them may not."""
        while True:
            change = await self._changes.get()
            self._sequence = await self._port.publish_kv([change])
            self._changes.task_done()

    async def published(self) -> None:
        """Wait until all changes are published."""
        await self._changes.join()

    def on_events(self, cache: int, events: Iterable[KvEvent]) -> None:
        """Take over what a cache of the server has published."""
        for change in self._held.apply(cache, events):
            self._changes.put_nowait(change)

    def on_started(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Count the full blocks of a prompt as cached: the request was sent to the server."""
        if request_id in self._requests:
            return
        self._requests[request_id] = tuple(dict.fromkeys(hashes))
        new = tuple(block for block in self._requests[request_id] if not self._users[block])
        self._users.update(self._requests[request_id])
        if new:
            size = self._layout.block_size
            stored = BlockStored(
                block_hashes=new, parent_block_hash=None, token_ids=(), block_size=size
            )
            self.on_events(self._of_requests, [stored])

    def on_over(self, request_id: RequestId, now: float) -> None:
        """Go by the server's events a moment from now: the request is not there any more."""
        if hashes := self._requests.pop(request_id, ()):
            self._over.append((now + _EVENTS_S, hashes))

    def forget_over(self, now: float) -> None:
        """Forget the blocks of requests that have been over for a moment."""
        while self._over and self._over[0][0] <= now:
            _, hashes = self._over.popleft()
            self._users.subtract(hashes)
            gone = tuple(block for block in hashes if not self._users[block])
            for block in gone:
                del self._users[block]
            if gone:
                self.on_events(self._of_requests, [BlockRemoved(block_hashes=gone)])

    def on_computed(self, token_ids: Sequence[int], salt: str) -> None:
        """Record the tokens of a request that is over, where no events tell of its blocks."""
        if self._recent is not None:
            hashes = block_hashes(
                token_ids, model=self._layout.model, salt=salt, block_size=self._layout.block_size
            )
            self.on_events(0, self._recent.use(hashes))

    def snapshot(self, asked: SnapshotBlocks) -> Iterator[BlocksSnapshot]:
        """Yield all that is held, in pages."""
        return snapshot_pages(asked, self._sequence, list(self._held.held()))

    def load(self) -> KvstoreLoad:
        """Return how full the cache is."""
        return KvstoreLoad(
            n_stored=min(len(self._held), self._n_blocks),
            n_reserved=0,
            n_leased=0,
            n_blocks=self._n_blocks,
            sequence=self._sequence,
        )
