"""What a put has to tell the world once it is committed: KV events from reservations.

A kvstore learns a block's parent and tokens when room for it is reserved and must announce
them when it is committed; in between they are kept here, by ticket.
"""

from collections.abc import Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import BlockStored
from halfmoon_protocol.messages import ReserveBlocks

MEDIUM = "CPU"


def stored_events(put: ReserveBlocks, stored: Sequence[BlockHash]) -> list[BlockStored]:
    """One event per contiguous run of `stored`, which are some of the blocks of `put`."""
    size = put.layout.block_size
    index = {block: i for i, block in enumerate(put.hashes)}
    positions = sorted(index[block] for block in stored)
    events: list[BlockStored] = []
    start = 0
    for i in range(1, len(positions) + 1):
        if i < len(positions) and positions[i] == positions[i - 1] + 1:
            continue
        first, last = positions[start], positions[i - 1]
        events.append(
            BlockStored(
                block_hashes=put.hashes[first : last + 1],
                parent_block_hash=put.hashes[first - 1] if first else put.parent,
                token_ids=put.token_ids[first * size : (last + 1) * size],
                block_size=size,
                medium=MEDIUM,
            )
        )
        start = i
    return events
