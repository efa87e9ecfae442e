"""What a soak does to the file of blocks of a node: it reads headers, tears them, turns bits."""

from collections.abc import Sequence
from pathlib import Path

from halfmoon_kvstore.disk_tier.segment_file import scan_blocks
from halfmoon_kvstore.disk_tier.slot_header import SlotEntry
from halfmoon_kvstore.disk_tier.superblock import read_shape
from halfmoon_protocol.ids import BlockHash


def read_slot_headers(path: Path) -> dict[BlockHash, SlotEntry]:
    """What a segment file has, by its headers alone."""
    return {found.record.hash: found for found in scan_blocks(path)}


def tear_header(path: Path, slot: int) -> None:
    """Leave the headers of a slot as a write leaves them that was cut off in the first one."""
    shape = read_shape(path)
    assert shape is not None
    first, second = shape.header_offsets(slot)
    with path.open("r+b") as file:
        file.seek(first + 64)
        file.write(bytes(32))
        file.seek(second)
        file.write(bytes(128))


def flip_bits(path: Path, slots: Sequence[int]) -> None:
    """Turn one bit of each of these slots' bytes."""
    shape = read_shape(path)
    assert shape is not None
    with path.open("r+b") as file:
        for slot in slots:
            file.seek(shape.offset(slot) + 1000)
            [byte] = file.read(1)
            file.seek(shape.offset(slot) + 1000)
            file.write(bytes([byte ^ 1]))
