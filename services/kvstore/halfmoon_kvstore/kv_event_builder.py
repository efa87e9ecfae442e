"""Build the KV events that announce a kvstore's blocks and their tiers.

A block is announced in one medium, the fastest that holds it. A move between tiers is announced as
removed from one medium, then stored in the other. So a listener that ignores media knows which
blocks are here, and a listener that follows media knows how fast they are.

Halfmoon's own listeners need the hashes alone. With the setting `event_tokens` a put's tokens are
kept until its commit, and announced with its blocks. Moves between tiers have no tokens.
"""

from collections.abc import Sequence

import msgspec

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent
from halfmoon_protocol.messages import ReserveBlocks
from halfmoon_scheduling.tiers.tier_commands import AnnounceBlocks, Tier

#: Names of the tiers in vLLM's format.
MEDIA: dict[Tier, str] = {"memory": "CPU", "disk": "STORAGE"}


def kept_for_events(put: ReserveBlocks, *, with_tokens: bool) -> ReserveBlocks:
    """Return what is kept of a put until its blocks are announced."""
    return put if with_tokens else msgspec.structs.replace(put, token_ids=())


def stored_events(put: ReserveBlocks, stored: Sequence[BlockHash]) -> list[BlockStored]:
    """Return one event per contiguous run of `stored`, which are blocks of `put`.

    They have tokens if `put` has.
    """
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
                medium=MEDIA["memory"],
            )
        )
        start = i
    return events


def moved_events(move: AnnounceBlocks, block_size: int) -> list[KvEvent]:
    """Return the events of a move: blocks removed from a tier, and blocks stored in one."""
    medium = MEDIA[move.tier]
    events: list[KvEvent] = []
    if move.left:
        events.append(BlockRemoved(block_hashes=move.left, medium=medium))
    events += [
        BlockStored(
            block_hashes=(record.hash,),
            parent_block_hash=record.parent,
            token_ids=(),
            block_size=block_size,
            medium=medium,
        )
        for record in move.came
    ]
    return events
