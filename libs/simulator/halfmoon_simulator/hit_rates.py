"""Count hits of block references by policy and capacity: one pool, one pass, no clock.

Every block of a request is looked up in order. A hit counts as a use; a miss stores the block
and, when the pool is full, first evicts the one that the policy names. This is the setting of
Mooncake's Table 1 (arXiv 2407.00079) and of Figure 9 of its FAST'25 paper; the policies are
those of the live kvstore.
"""

from collections.abc import Sequence

from halfmoon_scheduling.cache.eviction_policy import EvictionPolicy
from halfmoon_simulator.workloads.traces import TraceRequest

#: Blocks of the published table; None: all.
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)


def hit_rate(
    requests: Sequence[TraceRequest], policy: EvictionPolicy, capacity: int | None
) -> float:
    """Share of block references that hit.

    Args:
        requests: in order of arrival.
        policy: empty; it holds what is stored afterwards.
        capacity: blocks that fit; None: all.
    """
    rows: dict[int, int] = {}
    blocks: list[int] = []
    hits = references = 0
    for request in requests:
        last = len(request.blocks) - 1
        references += len(request.blocks)
        for depth, block in enumerate(request.blocks):
            if block in rows:
                hits += 1
                policy.touch(rows[block])
                continue
            if capacity is not None and len(rows) == capacity:
                row = next(policy.candidates())
                policy.remove(row)
                del rows[blocks[row]]
                blocks[row] = block
            else:
                row = len(blocks)
                blocks.append(block)
            policy.insert(row, block, depth, tail=depth == last)
            rows[block] = row
    return hits / references if references else 0.0
