"""The short way: copies and batches that the thread that asks carries itself."""

import os
import random
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer import (
    Lost,
    Piece,
    Rejected,
    TimedOut,
    Transfer,
    TransferSettings,
)
from halfmoon_transfer.backends.socket_io import ReadAhead, SocketClosed, tune_socket
from halfmoon_transfer.regions.file_region import FileRegion
from halfmoon_transfer.threads.fair_thread_pool import FairThreadPool

PATIENCE_S = 60.0


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


async def test_it_can_be_awaited_too(make_world: Any) -> None:
    engine = make_world("shm").open("here")
    source, target = engine.allocate(10), engine.allocate(10)
    report = await engine.submit("read", [Piece(source.region, 0, target.region, 0, 10)])
    assert report.n_bytes == 10


def test_a_peer_that_is_mapped_already_is_copied_to_at_once(make_world: Any) -> None:
    world = make_world("shm")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(4096), there.allocate(4096)
    piece = Piece(local.region, 0, remote.region, 0, 4096)
    here.transfer("write", [piece])
    local.view[:] = b"!" * 4096
    assert here.submit("write", [piece]).done()
    assert remote.view == local.view


def test_whoever_submits_does_not_wait_for_a_file(
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
def test_a_file_that_is_reached_in_one_call_takes_the_bytes(
    make_world: Any, tmp_path: Path, kind: str
) -> None:
    world = make_world(kind)
    here, there = world.open("here"), world.open("there")
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    local, file, memory = here.allocate(4096), there.register_file(path), there.allocate(4096)
    local.view[:] = random.Random(6).randbytes(4096)
    pieces = [
        Piece(local.region, 0, file, 0, 2000),
        Piece(local.region, 2000, memory.region, 2000, 2096),
    ]
    here.transfer("write", pieces, PATIENCE_S)
    assert path.read_bytes()[:2000] == local.view[:2000]
    assert memory.view[2000:] == local.view[2000:]
    back = here.allocate(2000)
    here.transfer("read", [Piece(back.region, 0, file, 0, 2000)], PATIENCE_S)
    assert back.view == local.view[:2000]


@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
def test_a_small_transfer_that_notifies_does_so_once(make_world: Any, kind: str) -> None:
    world = make_world(kind)
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    here.transfer("write", [piece], PATIENCE_S)
    local.view[:] = b"!" * 100
    here.transfer("write", [piece], PATIENCE_S, notify=b"one")
    here.submit("write", [piece], PATIENCE_S, notify=b"two").result()
    for expected in (b"one", b"two"):
        note = there.notifications(PATIENCE_S)
        assert note is not None and note.message == expected
    assert remote.view == local.view
    assert there.notifications() is None


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
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    here.transfer("write", [piece], PATIENCE_S)
    with pytest.raises(Rejected, match="at remote offset 50"):
        here.transfer("write", [Piece(local.region, 0, remote.region, 50, 100)], PATIENCE_S)
    there.unregister(remote.region)
    with pytest.raises(Rejected, match="no region of this key"):
        here.transfer("write", [piece], PATIENCE_S)
    with pytest.raises(ValueError, match="not a 'move'"):
        here.transfer("move", [piece])


def test_a_mapped_peer_that_died_is_lost(make_world: Any) -> None:
    world = make_world("shm")
    here = world.open("here")
    there = world.start("there", 1, 1000)
    local = here.allocate(1000)
    piece = Piece(local.region, 0, there.region, 0, 1000)
    here.transfer("write", [piece], PATIENCE_S)
    there.kill()
    with pytest.raises(Lost):
        here.transfer("write", [piece], PATIENCE_S)


def test_the_waiting_thread_carries_over_a_wire_and_needs_no_other(make_world: Any) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    pieces = [Piece(local.region, 0, remote.region, 0, 100)]
    here.submit("read", pieces).result(PATIENCE_S)
    before = carriers()
    for _ in range(20):
        here.transfer("write", pieces, PATIENCE_S)
    assert carriers() == before


def stands_still(pid: int) -> bool:
    """Whether all threads of a process have stopped: that takes a while after the signal."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in tasks)


def test_a_peer_that_stands_still_does_not_keep_the_others_of_a_transfer_waiting(
    make_world: Any, eventually: Any
) -> None:
    world = make_world("tcp")
    here = world.open("here")
    still, live = world.start("still", 1, 100), world.open("live")
    local, remote = here.allocate(100), live.allocate(100)
    local.view[:] = b"!" * 100
    here.transfer("read", [Piece(local.region, 0, still.region, 0, 1)], PATIENCE_S)
    os.kill(still.pid, signal.SIGSTOP)
    try:
        eventually(lambda: stands_still(still.pid))
        pieces = [Piece(local.region, 0, peer.region, 0, 100) for peer in (still, remote)]
        transfer = here.submit("write", pieces[1:], PATIENCE_S)
        transfer.result(PATIENCE_S)
        remote.view[:] = bytes(100)
        with pytest.raises(TimedOut):
            here.transfer("write", pieces, deadline_s=2.0)
        assert remote.view == local.view
    finally:
        os.kill(still.pid, signal.SIGCONT)


def test_a_connection_that_has_hung_up_already_can_be_tuned() -> None:
    """An exception there would end the thread that accepts connections."""
    with socket.socket() as unconnected:
        tune_socket(unconnected)


def test_towards_this_host_less_is_buffered_for_sending_than_for_receiving() -> None:
    """So that a sender goes on while its peer still copies; larger ones cost single blocks."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        tune_socket(ours)
        send_bytes = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert send_bytes < ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


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


# Reading ahead.


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_what_is_read_ahead_is_neither_lost_nor_mixed_up(
    sizes: list[tuple[bool, int]], seed: int
) -> None:
    """Takes and fills in any order see the stream's bytes in order."""
    dice = random.Random(seed)
    total = sum(size for _, size in sizes)
    stream = dice.randbytes(total)
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(PATIENCE_S)
        sender = threading.Thread(target=_send_in_cuts, args=(left, stream, dice))
        sender.start()
        inbox, got = ReadAhead(right), b""
        for take, size in sizes:
            if take:
                got += bytes(inbox.take(size))
            else:
                parts = [memoryview(bytearray(n)) for n in (size // 3, size - size // 3) if n]
                inbox.fill(parts)
                got += b"".join(parts)
        sender.join()
        assert got == stream
        assert not inbox.wait()
        with pytest.raises(SocketClosed):
            inbox.take(1)


def _send_in_cuts(sock: socket.socket, stream: bytes, dice: random.Random) -> None:
    at = 0
    while at < len(stream):
        n_bytes = dice.choice([1, 7, 100, 5_000, 9_000])
        sock.sendall(stream[at : at + n_bytes])
        at += n_bytes
    sock.shutdown(socket.SHUT_WR)
