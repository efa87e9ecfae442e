"""The check of each access, and keys that allow some ranges, one direction, until taken back."""

import random
from typing import Any

import pytest

from halfmoon_protocol.regions import Region
from halfmoon_runtime.clock import FakeClock
from halfmoon_transfer import Memory, Piece, Rejected, TransferEngine
from halfmoon_transfer.interface import Op
from halfmoon_transfer.regions import region_table
from halfmoon_transfer.regions.access import (
    AccessRefused,
    AccessStatus,
    access_refusal,
    is_within,
)
from halfmoon_transfer.regions.region_grant import RegionGrant

PAGE = 1000
World = Any


def opened(world: World) -> tuple[TransferEngine, TransferEngine, Memory, Memory]:
    """Engines here and there, a page here, and ten pages there of which each byte is 7."""
    here, there = world.open("here"), world.open("there")
    local, pool = here.allocate(PAGE), there.allocate(10 * PAGE)
    pool.view[:] = b"\7" * len(pool.view)
    return here, there, local, pool


def move(here: TransferEngine, op: Op, local: Memory, remote: Region, page: int) -> None:
    here.transfer(op, [Piece(local.region, 0, remote, page * PAGE, PAGE)], 10.0)
    # The way with a plan must not differ from the fast one.
    here.submit(op, [Piece(local.region, 0, remote, page * PAGE, PAGE)], 10.0).result()


def test_a_key_to_read_some_pages_reads_them_and_nothing_else(checked_world: World) -> None:
    here, there, local, pool = opened(checked_world)
    key = there.grant(pool.region, [(2 * PAGE, PAGE), (5 * PAGE, PAGE)], "read", 60.0)
    move(here, "read", local, key, 2)
    move(here, "read", local, key, 5)
    assert bytes(local.view) == b"\7" * PAGE
    local.view[:] = bytes(PAGE)
    for page in (0, 3, 4, 9):
        with pytest.raises(Rejected, match="grants other ranges"):
            move(here, "read", local, key, page)
    with pytest.raises(Rejected, match="grants other ranges"):
        move(here, "write", local, key, 2)
    assert bytes(local.view) == bytes(PAGE)
    assert bytes(pool.view) == b"\7" * len(pool.view)


def test_a_key_to_write_some_pages_neither_reads_nor_writes_elsewhere(checked_world: World) -> None:
    here, there, local, pool = opened(checked_world)
    key = there.grant(pool.region, [(3 * PAGE, 2 * PAGE)], "write", 60.0)
    move(here, "write", local, key, 3)
    refused: list[tuple[Op, int]] = [("read", 3), ("write", 2), ("write", 5), ("read", 0)]
    for op, page in refused:
        with pytest.raises(Rejected, match="grants other ranges"):
            move(here, op, local, key, page)
    expected = bytearray(b"\7" * len(pool.view))
    expected[3 * PAGE : 4 * PAGE] = bytes(PAGE)
    assert bytes(pool.view) == expected


def test_a_key_that_was_taken_back_is_refused_and_the_others_stay(checked_world: World) -> None:
    here, there, local, pool = opened(checked_world)
    kept = there.grant(pool.region, [(0, PAGE)], "write", 60.0)
    key = there.grant(pool.region, [(0, PAGE)], "write", 60.0)
    move(here, "write", local, key, 0)
    there.revoke(key)
    pool.view[:PAGE] = b"\7" * PAGE
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "write", local, key, 0)
    assert bytes(pool.view[:PAGE]) == b"\7" * PAGE
    move(here, "write", local, kept, 0)
    with pytest.raises(Rejected, match="not a grant"):
        there.revoke(key)


def test_a_key_ends_at_its_deadline_and_with_its_region(checked_world: World) -> None:
    here, there, local, pool = opened(checked_world)
    late = there.grant(pool.region, [(0, PAGE)], "write", 0.0)
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "write", local, late, 0)
    key = there.grant(pool.region, [(0, PAGE)], "write", 60.0)
    there.unregister(pool.region)
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "write", local, key, 0)


def test_a_key_can_neither_be_viewed_nor_mapped_nor_granted_further(checked_world: World) -> None:
    here, there, _, pool = opened(checked_world)
    key = there.grant(pool.region, [(0, PAGE)], "read", 60.0)
    assert here.view(key, 0, PAGE) is None
    assert there.view(key, 0, PAGE) is None
    with pytest.raises(Rejected, match="can't grant"):
        there.grant(key, [(0, PAGE)], "read", 60.0)
    with pytest.raises(Rejected, match="not a region"):
        there.unregister(key)
    with pytest.raises(Rejected, match="not a grant"):
        there.revoke(pool.region)


def test_a_key_ends_by_the_clock_that_the_table_is_given() -> None:
    clock = FakeClock()
    table = region_table.RegionTable("here", 1, clock.now)
    region = table.register(memoryview(bytearray(10)), "*")
    key = table.grant(region, [(0, 1)], "read", 60.0)
    clock.advance(59.0)
    assert table.extend_grant(key, 2.0)
    clock.advance(1.5)
    with table.leases.lease(1, key.key, 0, 1, write=False):
        pass
    clock.advance(0.5)
    with (
        pytest.raises(AccessRefused, match="UNKNOWN_KEY"),
        table.leases.lease(1, key.key, 0, 1, write=False),
    ):
        pass
    with table.leases.lease_batch(1, [(key.key, 0, 1)], write=False) as (refused,):
        assert isinstance(refused, AccessRefused)


def test_grants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_table, "MAX_GRANTS", 2)
    table = region_table.RegionTable("here", 1)
    region = table.register(memoryview(bytearray(10)), "*")
    first = table.grant(region, [(0, 1)], "read", 60.0)
    table.grant(region, [(0, 1)], "read", 60.0)
    with pytest.raises(AccessRefused, match="NO_ROOM"):
        table.grant(region, [(0, 1)], "read", 60.0)
    assert table.index.remove_grant(first.key) is not None
    table.grant(region, [(0, 1)], "read", 60.0)
    table.check()


@pytest.mark.parametrize("ranges", [[], [(0, 0)], [(-1, 5)], [(5, 6)], [(0, 1), (11, 1)]])
def test_ranges_that_are_none_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="can't grant"):
        RegionGrant(ranges, "read", 10, 1.0)


@pytest.mark.random_seeds(20)
def test_an_access_is_allowed_if_each_of_its_bytes_is_granted(seed: int) -> None:
    dice = random.Random(seed)
    ranges = []
    for _ in range(dice.randint(1, 8)):
        offset = dice.randrange(40)
        ranges.append(
            (offset, dice.randint(1, 40 - offset)) if dice.random() < 0.2 else (offset, 1)
        )
    grant = RegionGrant(ranges, "read", 40, 1.0)
    bytes_granted = {each for offset, length in ranges for each in range(offset, offset + length)}
    for offset in range(40):
        for length in range(1, 41 - offset):
            allowed = grant.refusal(offset, length, write=False, now=0.0) is None
            assert allowed == bytes_granted.issuperset(range(offset, offset + length))


# The one check of bounds and of the right to write, and what the index finds.


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


def test_every_way_to_access_a_region_refuses_the_same() -> None:
    table = region_table.RegionTable("here", 1)
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
    table = region_table.RegionTable("here", 2)
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
