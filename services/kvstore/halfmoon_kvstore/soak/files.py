"""What a soak does to the file of blocks of a node: it reads headers, tears them, turns bits."""

from collections.abc import Sequence
from pathlib import Path

from halfmoon_kvstore.segment import Found, Segment, read_shape
from halfmoon_protocol.ids import BlockHash


def headers(path: Path) -> dict[BlockHash, Found]:
    """What a segment file has, by its headers alone."""
    shape = read_shape(path)
    if shape is None:
        return {}
    opened = Segment(path, shape)
    try:
        return {found.record.hash: found for found in opened.blocks()}
    finally:
        opened.close()


def tear(path: Path, slot: int) -> None:
    """Leave the header of a slot as a write leaves it that was cut off in the middle."""
    with path.open("r+b") as file:
        file.seek(4096 + slot * 128 + 64)
        file.write(bytes(32))


def flip(path: Path, slots: Sequence[int]) -> None:
    """Turn one bit of each of these slots' bytes."""
    shape = read_shape(path)
    assert shape is not None
    with path.open("r+b") as file:
        for slot in slots:
            file.seek(shape.offset(slot) + 1000)
            [byte] = file.read(1)
            file.seek(shape.offset(slot) + 1000)
            file.write(bytes([byte ^ 1]))
