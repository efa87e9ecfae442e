"""The short way: copies and batches that the thread that asks carries itself."""

import os
import random
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_testing.processes.segment_process import segment_pattern
from halfmoon_transfer import (
    Cancelled,
    Piece,
    Rejected,
    TimedOut,
    Transfer,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends.socket_io import ReadAhead, SocketClosed, tune_socket
from halfmoon_transfer.backends.tcp import native
from halfmoon_transfer.regions.file_region import FileRegion
from halfmoon_transfer.threads.fair_thread_pool import FairThreadPool
from halfmoon_transfer.transfers.transfer_manager import TransferManager
from tests.transfer.conftest import stands_still

World = Any
PATIENCE_S = 60.0
KIB = 1024


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
    assert engine.stats().n_transfers == 1
    assert engine.stats().bytes_written == 4096


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


# Over TCP: small transfers that the asking thread makes over an idle connection.


@pytest.fixture(params=["native", "pure"])
def tcp(request: pytest.FixtureRequest, make_world: Any) -> World:
    """A world over TCP, with the extension in C or without."""
    if request.param == "native" and native.missing:
        pytest.skip(f"the extension is not built (`make native`): {native.missing}")
    world = make_world("tcp")
    world.native = (request.param == "native",) * 2
    return world


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From when it is called on, whatever takes the long way fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it took the long way")

    return lambda: monkeypatch.setattr(TransferManager, "start", refuse)


def test_a_small_transfer_over_an_idle_connection_needs_no_plan(tcp: World, no_plans: Any) -> None:
    here, there = tcp.open("here"), tcp.open("there")
    local, remote = here.allocate(64 * KIB), there.allocate(64 * KIB)
    local.view[:] = os.urandom(64 * KIB)
    here.transfer("write", [Piece(local.region, 0, remote.region, 0, 1)], PATIENCE_S)
    no_plans()
    for _ in range(3):
        remote.view[:] = bytes(64 * KIB)
        report = here.transfer("write", [Piece(local.region, 0, remote.region, 0, 64 * KIB)])
        assert (report.n_bytes, report.path, report.retries) == (64 * KIB, ("tcp",), 0)
        assert remote.view == local.view
    cuts = [(i * 1000, (i * 7 % 60) * 1000) for i in range(60)]
    expected = bytearray(local.view)
    for at, start in cuts:
        expected[at : at + 1000] = remote.view[start : start + 1000]
    here.transfer(
        "read", [Piece(local.region, at, remote.region, start, 1000) for at, start in cuts]
    )
    assert local.view == expected
    stats = here.stats()
    assert (stats.n_transfers, stats.n_connections, stats.n_live) == (5, 1, 0)
    assert (stats.bytes_written, stats.bytes_read) == (1 + 3 * 64 * KIB, 60_000)


def test_what_is_larger_or_goes_to_a_stranger_takes_the_long_way(tcp: World, no_plans: Any) -> None:
    here, there = tcp.open("here"), tcp.open("there")
    local, remote = here.allocate(64 * KIB + 1), there.allocate(64 * KIB + 1)
    no_plans()
    with pytest.raises(AssertionError, match="long way"):
        here.transfer("read", [Piece(local.region, 0, remote.region, 0, 1)])
    with pytest.raises(AssertionError, match="long way"):
        here.transfer("read", [Piece(local.region, 0, remote.region, 0, 64 * KIB + 1)])


def test_what_is_wrong_is_said_as_on_the_long_way_and_costs_no_connection(tcp: World) -> None:
    here, there = tcp.open("here"), tcp.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    sealed = there.register(bytes(100))
    good = Piece(local.region, 0, remote.region, 0, 100)
    larger = type(remote.region)(*(remote.region.segment, remote.region.generation), b"?" * 16, 100)
    here.transfer("write", [good], PATIENCE_S)
    for op, piece, words in (
        ("write", Piece(local.region, 0, remote.region, 1, 100), "at remote offset 1"),
        ("write", Piece(local.region, 0, remote.region, -1, 100), "at remote offset -1"),
        ("write", Piece(local.region, 1, remote.region, 0, 100), "at local offset 1"),
        ("write", Piece(local.region, 0, larger, 0, 100), "no region of this key"),
        ("write", Piece(local.region, 0, sealed, 0, 100), "read-only"),
        ("read", Piece(here.register(bytes(100)), 0, remote.region, 0, 100), "read-only memory"),
        ("read", Piece(remote.region, 0, remote.region, 0, 100), "not registered at segment here"),
    ):
        with pytest.raises(Rejected, match=words):
            here.transfer(op, [piece], PATIENCE_S)
        here.transfer("write", [good], PATIENCE_S)
    assert here.transfer("read", [Piece(local.region, 0, remote.region, 0, 0)]).n_bytes == 0
    assert here.stats().n_connections == 1


class Still:
    """A peer that stands still, with an idle connection to it; goes on when it is left."""

    def __init__(self, world: World, eventually: Any) -> None:
        self.here: TransferEngine = world.open("here")
        self.there = world.start("there", 1, 4096)
        self.local = self.here.allocate(4096)
        self.piece = Piece(self.local.region, 0, self.there.region, 0, 4096)
        self.here.transfer("read", [self.piece], PATIENCE_S)
        self._eventually = eventually

    def __enter__(self) -> "Still":
        os.kill(self.there.pid, signal.SIGSTOP)
        self._eventually(lambda: stands_still(self.there.pid))
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.there.pid, signal.SIGCONT)


def test_a_peer_that_stands_still_costs_the_deadline_and_nothing_of_it_lands_late(
    tcp: World, eventually: Any, no_plans: Any
) -> None:
    still = Still(tcp, eventually)
    first, last = b"1" * 4096, segment_pattern(4096)
    with still:
        still.local.view[:] = first
        with pytest.raises(
            TimedOut, match=r"write of 4096 bytes not done after 0.3 s; waiting for"
        ):
            still.here.transfer("write", [still.piece], deadline_s=0.3)
        assert still.here.stats().n_failures == 1
    # What the peer still holds of the first write ends before the second one begins.
    still.local.view[:] = last
    still.here.transfer("write", [still.piece], PATIENCE_S)
    still.local.view[:] = bytes(4096)
    still.here.transfer("read", [still.piece], PATIENCE_S)
    assert still.local.view == last


def test_closing_the_engine_ends_whoever_hurries(tcp: World, eventually: Any) -> None:
    with Still(tcp, eventually) as still:
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                still.here.transfer("read", [still.piece], PATIENCE_S)
            except TransferError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        fast_lanes = still.here.backend("tcp")._inner._fast_lanes  # type: ignore[attr-defined]
        eventually(lambda: fast_lanes)
        still.here.close()
        thread.join(PATIENCE_S)
        assert [type(each) for each in ended] == [Cancelled]


def test_a_signal_s_handler_runs_while_a_thread_hurries(tcp: World, eventually: Any) -> None:
    class Rang(Exception):
        pass

    def ring(_: int, __: FrameType | None) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with Still(tcp, eventually) as still:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Rang):
                still.here.transfer("write", [still.piece], PATIENCE_S)
        assert still.here.transfer("write", [still.piece], PATIENCE_S).n_bytes == 4096
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_connection_that_died_while_idle_is_replaced_unnoticed(tcp: World) -> None:
    here, first = tcp.open("here"), tcp.open("there", generation=1)
    port = int(first.descriptor.endpoints["tcp"].address.rpartition(":")[2])
    local, remote = here.allocate(10), first.allocate(10)
    here.transfer("write", [Piece(local.region, 0, remote.region, 0, 10)], PATIENCE_S)
    first.close()
    second = tcp.open("there", generation=1, port=port)
    target = second.allocate(10)
    local.view[:] = b"0123456789"
    here.transfer("write", [Piece(local.region, 0, target.region, 0, 10)], PATIENCE_S)
    assert target.view == local.view
    assert here.stats().n_connections == 1


def test_many_threads_that_hurry_share_few_connections(tcp: World) -> None:
    here, there = tcp.open("here"), tcp.open("there")
    local, remote = here.allocate(8 * KIB), there.allocate(8 * KIB)
    wrong: list[str] = []

    def work(slot: int) -> None:
        mine = slice(slot * KIB, (slot + 1) * KIB)
        piece = Piece(local.region, slot * KIB, remote.region, slot * KIB, KIB)
        for number in range(30):
            sent = bytes([slot * 30 + number]) * KIB
            local.view[mine] = sent
            here.transfer("write", [piece], PATIENCE_S)
            local.view[mine] = bytes(KIB)
            here.transfer("read", [piece], PATIENCE_S)
            if local.view[mine] != sent:
                wrong.append(f"thread {slot}, round {number}")

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = here.stats()
    assert stats.n_transfers == 8 * 30 * 2
    assert stats.n_connections <= 2 * TransferSettings().lanes
    here.check()


def test_a_local_region_can_be_taken_back_only_after_the_short_way_is_gone(
    tcp: World, eventually: Any
) -> None:
    with Still(tcp, eventually) as still:

        def wait() -> None:
            with pytest.raises(TransferError):
                still.here.transfer("read", [still.piece], deadline_s=0.5)

        thread = threading.Thread(target=wait)
        thread.start()
        fast_lanes = still.here.backend("tcp")._inner._fast_lanes  # type: ignore[attr-defined]
        eventually(lambda: fast_lanes)
        still.here.unregister(still.local.region)
        assert not fast_lanes
        thread.join()


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
