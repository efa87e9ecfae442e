"""A peer that is gone, asked for thousands of slices: tried once, said once, and soon."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.processes.segment_process import SegmentProcess
from halfmoon_transfer import Lost, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.backends import socket_io
from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.shm.shm_peer import ShmPeer
from halfmoon_transfer.backends.tcp import dial_gate, tcp_backend
from halfmoon_transfer.backends.tcp.dial_gate import DialFailed, DialGate
from halfmoon_transfer.backends.tcp.lane import Lane
from halfmoon_transfer.metadata.descriptor import rail_name
from halfmoon_transfer.threads.stop_signal import StopSignal
from tests.transfer.conftest import stands_still

N_SLICES = 2048
SLICE_BYTES = 16 * 1024
PATIENCE_S = 60.0
PLACE = ("there", 1, "127.0.0.1:1")


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each connection that TCP tried to make, in order."""
    made: list[tuple[str, int]] = []
    really = socket_io.connect_any

    def counting(host: str, port: int, until: float, stop: StopSignal) -> socket.socket:
        made.append((host, port))
        return really(host, port, until, stop)

    monkeypatch.setattr(tcp_backend, "connect_any", counting)
    return made


def scattered(local: Any, remote: Any) -> list[Piece]:
    """Pieces that don't touch: each is a slice of its own."""
    return [
        Piece(local.region, 2 * i * SLICE_BYTES, remote, 2 * i * SLICE_BYTES, SLICE_BYTES)
        for i in range(N_SLICES)
    ]


@pytest.fixture(params=["tcp", "shm", "shm,tcp"])
def backends(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    yield MemoryStore()


@pytest.mark.parametrize("known", [True, False], ids=["connected", "new"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_thousands_of_slices_to_a_dead_peer_fail_once_and_say_it_once(
    store: MemoryStore,
    backends: str,
    known: bool,
    how: signal.Signals,
    dials: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    # A busy machine may take longer than the pause after which the address is dialled again.
    monkeypatch.setattr(dial_gate, "_FIRST_PAUSE_S", PATIENCE_S)
    monkeypatch.setattr(dial_gate, "_LONGEST_PAUSE_S", PATIENCE_S)
    if how is signal.SIGSTOP:  # it never answers, however long one waits
        monkeypatch.setattr(ShmPeer, "answer_s", 0.2)
    n_bytes = 2 * N_SLICES * SLICE_BYTES
    settings = TransferSettings(connect_timeout_s=0.5)
    with (
        TransferEngine.open(
            "here", metadata=store, backends=backends.split(","), settings=settings
        ) as engine,
        SegmentProcess("there", 1, backends, n_bytes, store) as peer,
    ):
        memory = engine.allocate(n_bytes)
        if known and how is signal.SIGKILL:
            piece = Piece(memory.region, 0, peer.region, 0, SLICE_BYTES)
            engine.submit("write", [piece]).result(PATIENCE_S)
        if how is signal.SIGKILL:
            peer.kill()
        else:
            os.kill(peer.pid, signal.SIGSTOP)
            # The signal takes its time: a thread that still runs would answer.
            eventually(lambda: stands_still(peer.pid))
        dials.clear()
        pieces = scattered(memory, peer.region)
        with pytest.raises(Lost) as failed:
            engine.submit("write", pieces, deadline_s=PATIENCE_S).result(PATIENCE_S)
        text = str(failed.value)
        for name in backends.split(","):
            assert text.count(f"{name} does not reach it, with {N_SLICES} slices to move") == 1
        assert len(dials) == ("tcp" in backends)
        # The next transfer does not wait for the same again.
        with pytest.raises(Lost, match="does not reach it"):
            engine.submit("write", pieces[:1], deadline_s=PATIENCE_S).result(PATIENCE_S)
        engine.check()


# -- the gate ----------------------------------------------------------------------------------


def refused() -> Lane:
    raise ConnectionRefusedError(111, "Connection refused")


def soon() -> StopSignal:
    return StopSignal.after(PATIENCE_S)


def test_while_one_dials_the_others_wait_and_share_its_failure() -> None:
    gate, started, go_on = DialGate(), threading.Event(), threading.Event()
    n_dials = 0
    failures: list[str] = []

    def slow() -> Lane:
        nonlocal n_dials
        n_dials += 1
        started.set()
        assert go_on.wait(PATIENCE_S)
        return refused()

    def want() -> None:
        try:
            gate.through(PLACE, soon(), slow)
        except DialFailed as error:
            failures.append(str(error))

    threads = [threading.Thread(target=want) for _ in range(8)]
    threads[0].start()
    assert started.wait(PATIENCE_S)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert n_dials == 1
    assert failures == ["[Errno 111] Connection refused"] * 8


def test_a_wait_for_another_ones_dial_ends_with_its_own_transfer() -> None:
    gate, started, go_on = DialGate(), threading.Event(), threading.Event()

    def slow() -> Lane:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return refused()

    def want() -> None:
        with pytest.raises(DialFailed):
            gate.through(PLACE, soon(), slow)

    first = threading.Thread(target=want)
    first.start()
    assert started.wait(PATIENCE_S)
    stop, ended = soon(), threading.Event()

    def stopped() -> Lane:
        raise OSError("stopped")

    def want_too() -> None:
        with pytest.raises(OSError, match="stopped"):
            gate.through(PLACE, stop, stopped)
        ended.set()

    second = threading.Thread(target=want_too)
    second.start()
    stop.set()
    assert ended.wait(PATIENCE_S), "it waited for a dial that is nothing to it"
    go_on.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)


def test_pauses_grow_with_each_failure_and_end_with_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    gate = DialGate()
    stop = soon()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop.deadline = 1e9
    pauses = []
    for _ in range(7):
        with pytest.raises(DialFailed):
            gate.through(PLACE, stop, refused)
        start = now
        while True:
            now += 0.05
            asked: list[bool] = []

            def look(asked: list[bool] = asked) -> Lane:
                asked.append(True)
                raise ConnectionResetError  # says nothing about the address

            with pytest.raises((DialFailed, ConnectionResetError)):
                gate.through(PLACE, stop, look)
            if asked:
                break
        pauses.append(round(now - start, 1))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]

    lane: Any = object()
    assert gate.through(PLACE, stop, lambda: lane) is lane
    with pytest.raises(DialFailed):
        gate.through(PLACE, stop, refused)
    now += 0.15
    assert gate.through(PLACE, stop, lambda: lane) is lane


def test_a_dial_that_its_own_transfer_cut_short_keeps_nobody_from_dialling() -> None:
    gate = DialGate()
    stopped = soon()
    stopped.set()
    with pytest.raises(ConnectionRefusedError):
        gate.through(PLACE, stopped, refused)
    lane: Any = object()
    assert gate.through(PLACE, soon(), lambda: lane) is lane


# -- several addresses -------------------------------------------------------------------------


def addressed(engine: TransferEngine, ports: list[int]) -> None:
    """Have an engine believe that segment "there" listens at these ports of this host."""
    known = engine._router._directory
    found, _ = known.resolve("there", 1, fresh=False)
    endpoint = found.endpoints["tcp"]
    rails = {
        rail_name("tcp", i): msgspec.structs.replace(endpoint, address=f"127.0.0.1:{port}")
        for i, port in enumerate(ports)
    }
    known.introduce(msgspec.structs.replace(found, endpoints=rails))


def test_one_live_address_among_dead_ones_carries_everything(
    store: MemoryStore, dials: list[tuple[str, int]]
) -> None:
    with (
        TransferEngine.open("here", metadata=store, backends=["tcp"]) as engine,
        SegmentProcess("there", 1, "tcp", 2 * N_SLICES * SLICE_BYTES, store) as peer,
    ):
        found, _ = engine._router._directory.resolve("there", 1, fresh=False)
        live = split_address(found.endpoints["tcp"].address, 0)[1]
        # More dead ones than a slice has tries.
        addressed(engine, [*(free_port() for _ in range(5)), live])
        memory = engine.allocate(2 * N_SLICES * SLICE_BYTES)
        transfer = engine.submit("write", scattered(memory, peer.region), deadline_s=PATIENCE_S)
        assert transfer.result(PATIENCE_S).n_bytes == N_SLICES * SLICE_BYTES
