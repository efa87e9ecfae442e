"""The extension's copy of a batch: the bytes of Python's, within the same bounds; and compared."""

import random
from typing import NamedTuple

import pytest

from halfmoon_protocol.regions import Region

extension = pytest.importorskip(
    "halfmoon_transfer_native", reason="make native builds it", exc_type=ImportError
)
copy = extension.copy
if not hasattr(extension, "differing"):
    pytest.skip("the extension is an older one: make native", allow_module_level=True)
differing = extension.differing

REGION = 6 * 1024 * 1024
NOWHERE = Region("peer", 1, bytes(16), REGION)


class Part(NamedTuple):
    """A slice, as the extension looks at it."""

    remote: Region
    remote_offset: int


def parts(*offsets: int) -> tuple[Part, ...]:
    return tuple(Part(NOWHERE, offset) for offset in offsets)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_slices_end_where_they_belong(write: bool, seed: int) -> None:
    dice = random.Random(seed)
    sizes = [dice.choice([1, 63, 64, 65, 4095, 70_000, 1_500_000]) for _ in range(4)]
    shifts = [dice.randrange(0, 130) for _ in sizes]
    local = [
        bytearray(dice.randbytes(size + shift)) for size, shift in zip(sizes, shifts, strict=True)
    ]
    views = tuple(memoryview(b)[shift:] for b, shift in zip(local, shifts, strict=True))
    remote = bytearray(dice.randbytes(REGION))
    offsets = [1_500_130 * i + dice.randrange(0, 130) for i in range(4)]
    before, local_before = bytes(remote), [bytes(each) for each in local]
    expected, local_expected = bytearray(remote), [bytearray(each) for each in local]
    for own, shift, size, offset in zip(local_expected, shifts, sizes, offsets, strict=True):
        if write:
            expected[offset : offset + size] = own[shift:]
        else:
            own[shift:] = before[offset : offset + size]
    assert copy(write, parts(*offsets), views, remote)
    assert remote == (expected if write else before)
    assert local == (local_before if write else local_expected)


@pytest.mark.parametrize("n_bytes", [1, 5 * 1024 * 1024])
@pytest.mark.parametrize("head", range(0, 70, 7))
def test_many_bytes_are_written_as_few_are(n_bytes: int, head: int) -> None:
    data = random.Random(head).randbytes(n_bytes)
    remote = bytearray(REGION)
    assert copy(True, parts(head), (memoryview(data),), remote)
    assert remote == bytes(head) + data + bytes(REGION - head - n_bytes)


def test_read_only_memory_is_not_written() -> None:
    with pytest.raises(BufferError):
        copy(True, parts(0), (memoryview(b"1"),), bytes(8))
    with pytest.raises(BufferError):
        copy(False, parts(0), (memoryview(b"1"),), bytearray(8))


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        copy(True, parts(0, 1), (memoryview(b"1"),), bytearray(8))


@pytest.mark.parametrize("offset", [REGION - 7, 2**63, 2**64 - 4])
def test_bytes_beside_the_region_are_not_compared(offset: int) -> None:
    views = (memoryview(bytes(8)),) * 2
    with pytest.raises(ValueError, match="out of the region's bounds"):
        differing(parts(0, offset), views, bytes(REGION))


def test_read_only_memory_is_compared() -> None:
    assert differing(parts(0, 1), (memoryview(b"12"), memoryview(b"13")), b"123") == [1]
    with pytest.raises(ValueError, match="do not go together"):
        differing(parts(0, 1), (memoryview(b"1"),), b"123")
