"""Damage a node's segment file: read its headers, tear them, and flip bits."""

from collections.abc import Sequence
from pathlib import Path

from halfmoon_kvstore.disk_tier.segment_file import scan_blocks
from halfmoon_kvstore.disk_tier.slot_header import SlotEntry
from halfmoon_kvstore.disk_tier.superblock import read_shape
from halfmoon_protocol.ids import BlockHash


def read_slot_headers(path: Path) -> dict[BlockHash, SlotEntry]:
    """Return the blocks of a segment file, by its headers alone."""
    return {found.record.hash: found for found in scan_blocks(path)}


def tear_header(path: Path, slot: int) -> None:
    """Tear the headers of a slot, as a write does that ends in the middle of the first one."""
    shape = read_shape(path)
    assert shape is not None
    first, second = shape.header_offsets(slot)
    with path.open("r+b") as file:
        file.seek(first + 64)
        file.write(bytes(32))
        file.seek(second)
        file.write(bytes(128))


def flip_bits(path: Path, slots: Sequence[int]) -> None:
    """Flip one bit in the bytes of each of these slots."""
    shape = read_shape(path)
    assert shape is not None
    with path.open("r+b") as file:
        for slot in slots:
            file.seek(shape.offset(slot) + 1000)
            [byte] = file.read(1)
            file.seek(shape.offset(slot) + 1000)
            file.write(bytes([byte ^ 1]))
