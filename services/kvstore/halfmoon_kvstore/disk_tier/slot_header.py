"""Encode the header of one slot of a segment file: the block in the slot, with a checksum.

A file has two copies of each header. `merge` chooses the right one when they differ: after damage,
or after a process ended between writing the two.
"""

import struct

import msgspec
import xxhash

from halfmoon_kvstore.disk_tier.superblock import HEADER_BYTES, SegmentShape
from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.disk_map import BlockRecord

#: Mark, depth, sequence, bytes, their xxh3-64, generation, lengths of hash and parent, 2 zeros,
#: the slot's number plus 1, hash and parent padded with zeros, xxh3-64 of the layout. Last comes
#: the xxh3-64 of all these fields. Version 1 of the format has zeros for slot and layout.
_HEADER = struct.Struct("<4sIQQQQBB2xI32s32sQQ")
assert _HEADER.size == HEADER_BYTES
_MARK = b"BLK1"
_SUM_AT = HEADER_BYTES - 8
EMPTY = bytes(HEADER_BYTES)
#: Longest hash of a block, in bytes.
MAX_HASH_BYTES = 32


class SlotEntry(msgspec.Struct, frozen=True):
    """A block in a slot of a segment, by its header."""

    slot: int
    record: BlockRecord
    #: Number of the node's write; later writes have higher numbers.
    sequence: int


class SlotHeaderCodec:
    """Pack and parse the headers of one segment."""

    def __init__(self, shape: SegmentShape) -> None:
        self._block_bytes = shape.layout.block_bytes
        self._layout_sum = xxhash.xxh3_64_intdigest(msgspec.json.encode(shape.layout))

    def pack(self, found: SlotEntry, generation: int) -> bytes:
        """Return the header of a block in its slot."""
        record = found.record
        parent = record.parent or b""
        header = _HEADER.pack(
            _MARK, record.depth, found.sequence, self._block_bytes, record.checksum, generation,
            len(record.hash), len(parent), found.slot + 1, record.hash, parent, self._layout_sum, 0,
        )  # fmt: skip
        return header[:_SUM_AT] + _sum(header[:_SUM_AT])

    def sequence(self, header: bytes, slot: int) -> int | None:
        """Return a header's sequence number, if it is intact and of this slot and layout."""
        if header[:4] != _MARK or header[_SUM_AT:] != _sum(header[:_SUM_AT]):
            return None
        _, _, sequence, n_bytes, _, _, _, _, number, _, _, layout_sum, _ = _HEADER.unpack(header)
        if n_bytes != self._block_bytes:
            return None
        if number not in (0, slot + 1) or layout_sum not in (0, self._layout_sum):
            return None
        return int(sequence)

    def parse(self, header: bytes, slot: int) -> SlotEntry | None:
        """Return the block in a slot, if the header is intact and of this slot and layout."""
        if self.sequence(header, slot) is None:
            return None
        _, depth, sequence, _, checksum, _, n_hash, n_parent, _, name, parent, _, _ = (
            _HEADER.unpack(header)
        )
        above = BlockHash(parent[:n_parent]) if n_parent else None
        return SlotEntry(
            slot, BlockRecord(BlockHash(name[:n_hash]), above, depth, checksum), sequence
        )

    def merge(self, first: bytes, second: bytes, slot: int) -> bytes | None:
        """Return the right one of a slot's two headers; None if both are damaged.

        If one is empty and the other damaged, the slot was empty.
        """
        if first == EMPTY == second:
            return EMPTY
        a = self.sequence(first, slot)
        b = a if first == second else self.sequence(second, slot)
        if a is not None and b is not None:
            return first if a >= b else second
        if a is None and b is None:
            return EMPTY if EMPTY in (first, second) else None
        return first if a is not None else second


def is_whole(header: bytes) -> bool:
    """Return whether the checksum of a header, of any slot and layout, is right."""
    return header[:4] == _MARK and header[_SUM_AT:] == _sum(header[:_SUM_AT])


def _sum(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
