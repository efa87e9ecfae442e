"""Hold which blocks a server has cached, by its KV events.

A server with several data-parallel ranks has a cache for each. A block is held while any rank has
it. A request meets one rank, so a prefix counts only as far as a single rank holds it.
"""

from collections.abc import Iterable, Iterator, Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

#: Hashes in one event: more would come near the limit of a message.
MAX_EVENT_HASHES = 100_000


class HeldBlocks:
    """The blocks of all caches of one server."""

    def __init__(self, n_caches: int) -> None:
        """Start with so many empty caches."""
        self._caches: tuple[set[BlockHash], ...] = tuple(set() for _ in range(n_caches))
        #: Blocks that any of them holds: counted, since loads are reported many times a second.
        self._n_held = 0

    def __len__(self) -> int:
        return self._n_held

    def held(self) -> Iterator[BlockHash]:
        """Yield each block that any cache holds, once."""
        for i, cache in enumerate(self._caches):
            for block in cache:
                if not any(block in earlier for earlier in self._caches[:i]):
                    yield block

    def n_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt one cache holds, at the most."""
        return max((_n_leading(cache, hashes) for cache in self._caches), default=0)

    def apply(self, i: int, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Apply the events of cache `i`; return what changes for the server as a whole."""
        cache = self._caches[i]
        others = [other for other in self._caches if other is not cache]
        changes: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    for block in event.block_hashes:
                        if isinstance(block, bytes) and block not in cache:
                            self._n_held += not any(block in other for other in others)
                            cache.add(BlockHash(block))
                    changes.append(event)
                case BlockRemoved():
                    named = dict.fromkeys(event.block_hashes)
                    gone = [BlockHash(h) for h in named if isinstance(h, bytes) and h in cache]
                    cache.difference_update(gone)
                    changes += self._removed(gone, others)
                case AllBlocksCleared():
                    gone = list(cache)
                    cache.clear()
                    removed = self._removed(gone, others)
                    changes += removed if others else [event]
        return [part for change in changes for part in _split(change)]

    def _removed(self, gone: list[BlockHash], others: list[set[BlockHash]]) -> list[KvEvent]:
        """Return the event for blocks that left a cache, unless another one holds them."""
        hashes = tuple(block for block in gone if not any(block in other for other in others))
        self._n_held -= len(hashes)
        return [BlockRemoved(block_hashes=hashes)] if hashes else []


def _n_leading(cache: set[BlockHash], hashes: Sequence[BlockHash]) -> int:
    return next((i for i, block in enumerate(hashes) if block not in cache), len(hashes))


def _split(event: KvEvent) -> Iterator[KvEvent]:
    """Yield an event in parts that fit a message."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= MAX_EVENT_HASHES:
        yield event
        return
    for start in range(0, len(event.block_hashes), MAX_EVENT_HASHES):
        part = event.block_hashes[start : start + MAX_EVENT_HASHES]
        if isinstance(event, BlockRemoved):
            yield BlockRemoved(block_hashes=part)
        else:
            yield BlockStored(
                block_hashes=part,
                parent_block_hash=event.block_hashes[start - 1]
                if start
                else event.parent_block_hash,
                token_ids=(),
                block_size=event.block_size,
            )
