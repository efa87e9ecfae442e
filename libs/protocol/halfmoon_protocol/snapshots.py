"""Split what a kvstore stores into the answers to a `SnapshotBlocks`."""

from collections.abc import Iterator, Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages.kvstore import BlocksSnapshot, SnapshotBlocks

#: Hashes of a page that indexes ask for: a few milliseconds for the one that reads it.
PAGE = 8192
#: Most hashes of one answer: more would exceed the limit of a message.
MAX_HASHES = 800_000
#: Most pages of one snapshot, whatever was asked: each is a message in a queue.
_MAX_PAGES = 256


def snapshot_pages(
    asked: SnapshotBlocks, sequence: int, hashes: Sequence[BlockHash], room_bytes: int = 0
) -> Iterator[BlocksSnapshot]:
    """Yield the pages of a snapshot: at least one, in order.

    One that was not asked for in pages has `MAX_HASHES` at most, and leaves the others out.

    Args:
        asked: the question, with the size of a page.
        sequence: number of the last KV event that is contained.
        hashes: all blocks of memory and disk.
        room_bytes: bytes of blocks that fit without evicting others.
    """
    n = len(hashes) if asked.page else min(len(hashes), MAX_HASHES)
    size = min(max(asked.page or n, -(-n // _MAX_PAGES), 1), MAX_HASHES)
    for first in range(0, max(n, 1), size):
        page = tuple(hashes[first : min(first + size, n)])
        yield BlocksSnapshot(
            sequence=sequence,
            hashes=page,
            ticket=asked.ticket,
            room_bytes=room_bytes,
            n_before=first,
            n_after=n - first - len(page),
        )
