"""How many block references hit, by policy and capacity: one pool, one walk, no clock.

Every block of a request is looked up in order. A hit counts as a use; a miss stores the block
and, when the pool is full, first evicts the one that the policy names. This is the setting of
Mooncake's Table 1 (arXiv 2407.00079) and of Figure 9 of its FAST'25 paper.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from halfmoon_scheduling.eviction import EvictionPolicy, Lfu, Lru
from halfmoon_simulator.traces import TraceRequest


class LengthAware(EvictionPolicy[int]):
    """Like LFU; among blocks used equally often, position in the prompt decides, then recency.

    The paper says that it prioritises blocks that occur later in requests, which can be read
    both ways: hence `keep`.
    """

    def __init__(self, positions: Mapping[int, int], *, keep: str) -> None:
        """An empty policy.

        Args:
            positions: index of each block in the prompts that have it (a block has one).
            keep: "later" evicts the start of prompts first, "earlier" their ends.
        """
        self._positions = positions
        self._sign = 1 if keep == "later" else -1
        #: The current rank of each key: uses, position, time of last use.
        self._ranks: dict[int, tuple[int, int, int]] = {}
        #: Ranks, outdated ones included; compacted when they are the majority.
        self._heap: list[tuple[tuple[int, int, int], int]] = []
        self._clock = 0

    def insert(self, key: int) -> None:
        """See `EvictionPolicy.insert`."""
        self._rank(key, 1)

    def touch(self, key: int) -> None:
        """See `EvictionPolicy.touch`."""
        self._rank(key, self._ranks[key][0] + 1)

    def remove(self, key: int) -> None:
        """See `EvictionPolicy.remove`."""
        del self._ranks[key]

    def candidates(self) -> Iterator[int]:
        """See `EvictionPolicy.candidates`; the first one is cheap, all of them are sorted."""
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        if self._heap:
            yield self._heap[0][1]
            first = self._heap[0][1]
            yield from (
                key for key in sorted(self._ranks, key=self._ranks.__getitem__) if key != first
            )

    def __len__(self) -> int:
        return len(self._ranks)

    def _rank(self, key: int, uses: int) -> None:
        self._clock += 1
        rank = (uses, self._sign * self._positions[key], self._clock)
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)


def hit_rate(
    requests: Sequence[TraceRequest], policy: EvictionPolicy[int], capacity: int | None
) -> float:
    """Share of block references that hit.

    Args:
        requests: in order of arrival.
        policy: empty; it holds what is stored afterwards.
        capacity: blocks that fit; None: all.
    """
    stored: set[int] = set()
    hits = references = 0
    for request in requests:
        references += len(request.blocks)
        for block in request.blocks:
            if block in stored:
                hits += 1
                policy.touch(block)
                continue
            if capacity is not None and len(stored) == capacity:
                victim = next(policy.candidates())
                policy.remove(victim)
                stored.remove(victim)
            policy.insert(block)
            stored.add(block)
    return hits / references if references else 0.0


def open_named(name: str, requests: Sequence[TraceRequest]) -> EvictionPolicy[int]:
    """An empty policy of this name, for `hit_rate` over these requests.

    Raises:
        ValueError: none of `POLICY_NAMES`.
    """
    match name:
        case "LRU":
            return Lru()
        case "LFU":
            return Lfu()
        case "LengthAware, keep later" | "LengthAware, keep earlier":
            positions = {block: i for request in requests for i, block in enumerate(request.blocks)}
            return LengthAware(positions, keep=name.rsplit(" ", 1)[1])
        case _:
            raise ValueError(f"no policy {name!r}, there are: {', '.join(POLICY_NAMES)}")


POLICY_NAMES = ("LRU", "LFU", "LengthAware, keep later", "LengthAware, keep earlier")
