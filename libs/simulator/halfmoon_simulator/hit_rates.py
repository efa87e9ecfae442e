"""How many block references hit, by policy and capacity: one pool, one walk, no clock.

Every block of a request is looked up in order. A hit counts as a use; a miss stores the block
and, when the pool is full, first evicts the one that the policy names. This is the setting of
Mooncake's Table 1 (arXiv 2407.00079) and of Figure 9 of its FAST'25 paper; the policies are
those of the live kvstore.
"""

from collections.abc import Sequence

from halfmoon_scheduling.eviction import EvictionPolicy
from halfmoon_simulator.traces import TraceRequest


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
        last = len(request.blocks) - 1
        references += len(request.blocks)
        for depth, block in enumerate(request.blocks):
            if block in stored:
                hits += 1
                policy.touch(block)
                continue
            if capacity is not None and len(stored) == capacity:
                victim = next(policy.candidates())
                policy.remove(victim)
                stored.remove(victim)
            policy.insert(block, depth, tail=depth == last)
            stored.add(block)
    return hits / references if references else 0.0
