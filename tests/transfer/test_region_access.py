"""The one check of bounds and of the right to write, and what the index finds."""

import pytest

from halfmoon_protocol.regions import Region
from halfmoon_transfer import Piece
from halfmoon_transfer.regions.access import (
    AccessRefused,
    AccessStatus,
    access_refusal,
    is_within,
)
from halfmoon_transfer.regions.region_table import RegionTable


@pytest.mark.parametrize(
    ("offset", "length", "inside"),
    [
        (0, 10, True),
        (10, 0, True),
        (3, 7, True),
        (0, 11, False),
        (11, 0, False),
        (4, 7, False),
        (-1, 5, False),
        (5, -1, False),
        (2**63, 1, False),
    ],
)
def test_a_range_is_within_a_region_only_with_its_first_and_last_byte(
    offset: int, length: int, inside: bool
) -> None:
    assert is_within(offset, length, 10) == inside
    refused = access_refusal(offset, length, write=True, n_bytes=10, writable=True)
    assert (refused is None) == inside
    if refused is not None:
        assert (refused.status, refused.detail) == (AccessStatus.OUT_OF_BOUNDS, 10)


def test_only_a_write_needs_a_writable_region() -> None:
    assert access_refusal(0, 10, write=False, n_bytes=10, writable=False) is None
    refused = access_refusal(0, 10, write=True, n_bytes=10, writable=False)
    assert refused is not None
    assert refused.status is AccessStatus.READ_ONLY


def test_every_way_to_access_a_region_refuses_the_same() -> None:
    table = RegionTable("here", 1)
    fixed = table.register(memoryview(b"0123456789"), "*")
    for offset, length, write, status in (
        (4, 7, False, AccessStatus.OUT_OF_BOUNDS),
        (-1, 2, False, AccessStatus.OUT_OF_BOUNDS),
        (0, 10, True, AccessStatus.READ_ONLY),
    ):
        found = []
        with pytest.raises(AccessRefused) as refused:
            table.leases.acquire(1, fixed.key, offset, length, write=write)
        found.append(refused.value.status)
        with table.leases.lease_batch(1, [(fixed.key, offset, length)], write=write) as views:
            assert isinstance(views[0], AccessRefused)
            found.append(views[0].status)
        remote = Region("there", 1, bytes(16), 100)
        with pytest.raises(AccessRefused) as refused:
            table.leases.acquire_local([Piece(fixed, offset, remote, 0, length)], write=write)
        found.append(refused.value.status)
        assert found == [status] * 3
    [entry] = table.clear()
    assert entry.n_leases == 0, "a refused access leaves no lease behind"


def test_a_region_of_another_segment_or_generation_is_not_local() -> None:
    table = RegionTable("here", 2)
    region = table.register(memoryview(bytearray(10)), "*")
    assert table.local_extent(region) == (10, True)
    for other, status in (
        (Region("there", 2, region.key, 10), AccessStatus.UNKNOWN_KEY),
        (Region("here", 1, region.key, 10), AccessStatus.OTHER_GENERATION),
        (Region("here", 2, bytes(16), 10), AccessStatus.UNKNOWN_KEY),
    ):
        with pytest.raises(AccessRefused) as refused:
            table.local_extent(other)
        assert refused.value.status is status


def test_a_watcher_that_raises_takes_the_region_back() -> None:
    table = RegionTable("here", 1)

    def refuse() -> None:
        raise OSError("no room to announce it")

    table.add_watcher(refuse)
    with pytest.raises(OSError, match="no room"):
        table.register(memoryview(bytearray(10)), "*")
    assert len(table) == 0
    table.remove_watcher(refuse)
    table.register(memoryview(bytearray(10)), "*")
    assert len(table) == 1
    table.check()
