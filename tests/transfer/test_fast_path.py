"""The short way: copies and batches that the thread that asks carries itself."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from halfmoon_transfer import Piece, Rejected, TimedOut, Transfer, TransferSettings
from halfmoon_transfer.regions.file_region import FileRegion
from halfmoon_transfer.threads.fair_thread_pool import FairThreadPool
from tests.transfer.conftest import PATIENCE_S, Ends, standing_still


def carriers() -> list[str]:
    """Threads that carry batches; those that listen and watch have other names."""
    return [
        each.name
        for each in threading.enumerate()
        if "halfmoon-transfer" in each.name and each.name.rpartition("-")[2].isdecimal()
    ]


def test_a_small_copy_is_done_when_submit_returns(make_world: Any) -> None:
    engine = make_world("shm").open("here")
    source, target = engine.allocate(4096), engine.allocate(4096)
    source.view[:] = random.Random(1).randbytes(4096)
    transfer = engine.submit("write", [Piece(source.region, 0, target.region, 0, 4096)])
    assert transfer.done()
    seen: list[Transfer] = []
    transfer.add_done_callback(seen.append)
    assert seen == [transfer]
    assert transfer.result().path == ("memory",)
    assert target.view == source.view
    assert carriers() == []
    assert engine.stats().n_transfers == 1
    assert engine.stats().bytes_written == 4096


def test_a_peer_that_is_mapped_already_is_copied_to_at_once(make_world: Any) -> None:
    ends = Ends(make_world("shm"), 4096)
    ends.here.transfer("write", [ends.piece])
    ends.local.view[:] = b"!" * 4096
    assert ends.here.submit("write", [ends.piece]).done()
    assert ends.remote.view == ends.local.view


def test_nobody_waits_in_submit_for_a_file(
    make_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_world("shm").open("here")
    path = tmp_path / "file"
    path.write_bytes(b"!" * 4096)
    file, memory = engine.register_file(path), engine.allocate(4096)
    ready = threading.Event()
    load = FileRegion.load

    def slow(region_file: FileRegion, offset: int, view: memoryview) -> None:
        assert ready.wait(PATIENCE_S)
        load(region_file, offset, view)

    monkeypatch.setattr(FileRegion, "load", slow)
    transfer = engine.submit("read", [Piece(memory.region, 0, file, 0, 4096)])
    assert not transfer.done()
    ready.set()
    transfer.result(PATIENCE_S)
    assert memory.view == b"!" * 4096


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_file_reached_in_one_call_has_the_bytes(
    make_world: Any, tmp_path: Path, kind: str
) -> None:
    ends = Ends(make_world(kind), 4096)
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    file, local = ends.there.register_file(path), ends.local
    local.view[:] = random.Random(6).randbytes(4096)
    pieces = [
        Piece(local.region, 0, file, 0, 2000),
        Piece(local.region, 2000, ends.remote.region, 2000, 2096),
    ]
    ends.here.transfer("write", pieces, PATIENCE_S)
    assert path.read_bytes()[:2000] == local.view[:2000]
    assert ends.remote.view[2000:] == local.view[2000:]
    back = ends.here.allocate(2000)
    ends.here.transfer("read", [Piece(back.region, 0, file, 0, 2000)], PATIENCE_S)
    assert back.view == local.view[:2000]


@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
def test_a_small_transfer_that_notifies_does_so_once(make_world: Any, kind: str) -> None:
    ends = Ends(make_world(kind), 100)
    ends.here.transfer("write", [ends.piece], PATIENCE_S)
    ends.local.view[:] = b"!" * 100
    ends.here.transfer("write", [ends.piece], PATIENCE_S, notify=b"one")
    ends.move("write", notify=b"two")
    for expected in (b"one", b"two"):
        note = ends.there.notifications(PATIENCE_S)
        assert note is not None and note.message == expected
    assert ends.remote.view == ends.local.view
    assert ends.there.notifications() is None


def test_waiting_for_a_transfer_in_one_call_moves_the_same_bytes(world: Any) -> None:
    dice = random.Random(5)
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(1_000_000), there.allocate(1_000_000)
    remote.view[:] = dice.randbytes(1_000_000)
    starts = list(range(0, 1_000_000, 10_000))
    dice.shuffle(starts)
    for n_pieces in (1, 3, len(starts)):
        local.view[:] = bytes(1_000_000)
        pieces = [
            Piece(local.region, start, remote.region, start, 9_000) for start in starts[:n_pieces]
        ]
        report = here.transfer("read", pieces, PATIENCE_S)
        assert report.n_bytes == n_pieces * 9_000
        for start in starts:
            read = local.view[start : start + 9_000]
            expected = remote.view[start : start + 9_000]
            assert read == (expected if start in starts[:n_pieces] else bytes(9_000))
    here.check()


def test_errors_of_the_short_way_are_those_of_the_long_one(world: Any) -> None:
    ends = Ends(world, 100)
    here, local, remote = ends.here, ends.local.region, ends.remote.region
    here.transfer("write", [ends.piece], PATIENCE_S)
    with pytest.raises(Rejected, match="at remote offset 50"):
        here.transfer("write", [Piece(local, 0, remote, 50, 100)], PATIENCE_S)
    ends.there.unregister(remote)
    with pytest.raises(Rejected, match="no region of this key"):
        here.transfer("write", [ends.piece], PATIENCE_S)
    with pytest.raises(ValueError, match="not a 'move'"):
        here.transfer("move", [ends.piece])  # type: ignore[arg-type]


def test_the_waiting_thread_carries_over_a_wire_and_needs_no_other(make_world: Any) -> None:
    ends = Ends(make_world("tcp"), 100)
    ends.move("read")
    before = carriers()
    for _ in range(20):
        ends.here.transfer("write", [ends.piece], PATIENCE_S)
    assert carriers() == before


def test_a_peer_that_stands_still_keeps_no_other_of_a_transfer_waiting(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here")
    still, live = world.start("still", 1, 100), world.open("live")
    local, remote = here.allocate(100), live.allocate(100)
    local.view[:] = b"!" * 100
    here.transfer("read", [Piece(local.region, 0, still.region, 0, 1)], PATIENCE_S)
    with standing_still(still.pid):
        pieces = [Piece(local.region, 0, peer.region, 0, 100) for peer in (still, remote)]
        here.submit("write", pieces[1:], PATIENCE_S).result(PATIENCE_S)
        remote.view[:] = bytes(100)
        with pytest.raises(TimedOut):
            here.transfer("write", pieces, deadline_s=2.0)
        assert remote.view == local.view


def test_nothing_is_copied_by_a_closed_engine(make_world: Any) -> None:
    engine = make_world("shm").open("here", settings=TransferSettings())
    source, target = engine.allocate(10), engine.allocate(10)
    source.view[:] = b"0123456789"
    engine.close()
    transfer = engine.submit("write", [Piece(source.region, 0, target.region, 0, 10)])
    assert target.view == bytes(10)
    with pytest.raises(Exception, match="is closed"):
        transfer.result(PATIENCE_S)


def test_who_carries_himself_takes_a_lane_like_any_other() -> None:
    couriers = FairThreadPool("test", threads=4, lanes=1)
    try:
        ran: list[str] = []

        def outer() -> None:
            couriers.check()
            assert not couriers.try_run_inline("a", lambda: ran.append("second lane"))
            assert couriers.try_run_inline("b", lambda: ran.append("other peer"))

        assert couriers.try_run_inline("a", outer)
        assert ran == ["other peer"]
        assert couriers.try_run_inline("a", lambda: ran.append("free again"))
        assert ran[1:] == ["free again"]
        couriers.check()
    finally:
        couriers.close()
    assert not couriers.try_run_inline("a", lambda: None)


def test_who_carries_himself_does_not_overtake_and_frees_the_lane_for_those_in_line() -> None:
    couriers = FairThreadPool("test", threads=4, lanes=1)
    posted = threading.Event()
    try:

        def holding_the_lane() -> None:
            couriers.submit("a", posted.set)
            assert not couriers.try_run_inline("a", lambda: None)

        assert couriers.try_run_inline("a", holding_the_lane)
        assert posted.wait(PATIENCE_S)
    finally:
        couriers.close()
