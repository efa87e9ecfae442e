"""The short way over TCP: small transfers that the asking thread makes over an idle connection."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from halfmoon_testing.processes.segment_process import segment_pattern
from halfmoon_transfer import (
    Cancelled,
    Piece,
    Rejected,
    TimedOut,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.tcp import native
from halfmoon_transfer.transfers.transfer_manager import TransferManager

World = Any
PATIENCE_S = 60.0
KIB = 1024


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


def stands_still(pid: int) -> bool:
    """Whether all threads of a process have stopped: that takes a while after the signal."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in tasks)


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


def test_injected_faults_are_met_on_the_long_way(tcp: World) -> None:
    here = tcp.open(
        "here",
        backends=(FaultInjection("tcp", FaultPlan(seed=3, corrupt_rate=0.5)),),
        settings=TransferSettings(tries_per_path=50),
    )
    local, remote = here.allocate(100), tcp.open("there").allocate(100)
    local.view[:] = b"!" * 100
    pieces = [Piece(local.region, 0, remote.region, 0, 100)]
    assert sum(here.transfer("write", pieces, PATIENCE_S).retries for _ in range(20)) > 0
    assert remote.view == local.view


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
