"""A listener: who is accepted, who is turned away, how it ends. And what sockets are told."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer.backends.socket_io import ReadAhead, SocketClosed, connect_any, tune_socket
from halfmoon_transfer.backends.socket_listener import SocketListener
from halfmoon_transfer.threads.stop_signal import StopSignal
from tests.transfer.conftest import PATIENCE_S, eventually


class Nonsense(Exception):
    pass


class Echo:
    """Sends back what it gets; "?" is nonsense."""

    def __init__(self, stack: ExitStack, *, stall_timeout_s: float = PATIENCE_S) -> None:
        self.served: list[socket.socket] = []
        self.ended = threading.Semaphore(0)
        self.listener = SocketListener(
            self._serve,
            malformed=Nonsense,
            farewell=lambda reason: f"no: {reason}".encode(),
            bind="127.0.0.1",
            port=0,
            label="halfmoon-transfer-echo",
            max_connections=2,
            stall_timeout_s=stall_timeout_s,
        )
        stack.callback(self.listener.close)
        self._stack = stack

    def dial(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.listener.port), timeout=PATIENCE_S)
        return self._stack.enter_context(sock)

    def greeted(self) -> socket.socket:
        sock = self.dial()
        sock.sendall(b"hello")
        assert sock.recv(100) == b"hello"
        return sock

    def _serve(self, sock: socket.socket) -> None:
        self.served.append(sock)
        try:
            while data := sock.recv(100):
                if data == b"?":
                    raise Nonsense(data)
                sock.sendall(data)
        finally:
            self.ended.release()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def echo(stack: ExitStack) -> Echo:
    echo = Echo(stack)
    echo.listener.start()
    return echo


def test_who_comes_too_many_is_told_and_the_others_go_on(echo: Echo) -> None:
    first, second = echo.greeted(), echo.greeted()
    surplus = echo.dial()
    assert surplus.recv(100) == b"no: 2 connections are open, the limit"
    assert surplus.recv(100) == b""
    first.close()
    eventually(lambda: echo.listener.n_connections == 1)
    echo.greeted()
    second.sendall(b"still here")
    assert second.recv(100) == b"still here"


def test_nonsense_and_hanging_up_end_one_connection_and_leave_the_others(echo: Echo) -> None:
    first, second = echo.greeted(), echo.greeted()
    first.sendall(b"?")
    assert first.recv(100) == b""
    eventually(lambda: (echo.listener.n_malformed, echo.listener.n_connections) == (1, 1))
    third = echo.greeted()
    echo.listener.hang_up(echo.served[-1])
    assert third.recv(100) == b""
    second.sendall(b"still here")
    assert second.recv(100) == b"still here"


def test_whoever_dials_before_the_start_waits(stack: ExitStack) -> None:
    Echo(stack)  # one that never starts can be closed
    echo = Echo(stack)
    early = echo.dial()
    early.sendall(b"early")
    assert echo.served == []
    echo.listener.start()
    assert early.recv(100) == b"early"


def test_a_silent_connection_wakes_its_thread_after_the_patience(stack: ExitStack) -> None:
    echo = Echo(stack, stall_timeout_s=0.05)
    echo.listener.start()
    assert echo.dial().recv(100) == b""


def test_closing_hangs_up_on_everybody_and_waits_for_their_threads(echo: Echo) -> None:
    peers = [echo.greeted(), echo.greeted()]
    echo.listener.close()
    assert echo.ended.acquire(blocking=False)
    assert echo.ended.acquire(blocking=False)
    assert [peer.recv(100) for peer in peers] == [b"", b""]
    assert echo.listener.n_connections == 0
    with pytest.raises(ConnectionRefusedError):
        echo.dial()


# Sockets by themselves.


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


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_what_is_read_ahead_is_not_lost_nor_mixed(sizes: list[tuple[bool, int]], seed: int) -> None:
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


def test_a_name_that_no_host_can_have_is_a_failed_connection_and_so_is_one_dialled_late() -> None:
    until = time.monotonic() + 60
    for host in ("a" * 300, "a..b"):
        with pytest.raises(ConnectionError, match="no host name"):
            connect_any(host, 1, until, StopSignal(until))
    now = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no time is left to connect to '127\.0\.0\.1'"):
        connect_any("127.0.0.1", 1, now, StopSignal(now + 60))


def test_bytes_that_were_taken_do_not_come_again_after_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ahead = ReadAhead(ours)
        theirs.sendall(b"first")
        assert ahead.wait() and bytes(ahead.take(5)) == b"first"
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                ahead.wait()
        theirs.sendall(b"second")
        assert ahead.wait() and bytes(ahead.take(6)) == b"second"
