"""A listener: who is accepted, who is turned away, and how it ends."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from halfmoon_transfer.backends.socket_listener import SocketListener

Eventually = Callable[..., None]
PATIENCE_S = 60.0


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


def test_who_comes_too_many_is_told_and_the_others_go_on(
    stack: ExitStack, eventually: Eventually
) -> None:
    echo = Echo(stack)
    echo.listener.start()
    first, second = echo.greeted(), echo.greeted()
    surplus = echo.dial()
    assert surplus.recv(100) == b"no: 2 connections are open, the limit"
    assert surplus.recv(100) == b""
    first.close()
    eventually(lambda: echo.listener.n_connections == 1)
    echo.greeted()
    second.sendall(b"still here")
    assert second.recv(100) == b"still here"


def test_nonsense_is_counted_and_ends_its_own_connection_only(
    stack: ExitStack, eventually: Eventually
) -> None:
    echo = Echo(stack)
    echo.listener.start()
    first, second = echo.greeted(), echo.greeted()
    first.sendall(b"?")
    assert first.recv(100) == b""
    eventually(lambda: (echo.listener.n_malformed, echo.listener.n_connections) == (1, 1))
    second.sendall(b"still here")
    assert second.recv(100) == b"still here"


def test_hanging_up_on_one_leaves_the_others(stack: ExitStack) -> None:
    echo = Echo(stack)
    echo.listener.start()
    first, second = echo.greeted(), echo.greeted()
    echo.listener.hang_up(echo.served[0])
    assert first.recv(100) == b""
    second.sendall(b"still here")
    assert second.recv(100) == b"still here"


def test_whoever_dials_before_the_start_waits(stack: ExitStack) -> None:
    echo = Echo(stack)
    early = echo.dial()
    early.sendall(b"early")
    assert echo.served == []
    echo.listener.start()
    assert early.recv(100) == b"early"


def test_a_connection_that_says_nothing_wakes_its_thread_after_the_patience(
    stack: ExitStack,
) -> None:
    echo = Echo(stack, stall_timeout_s=0.05)
    echo.listener.start()
    assert echo.dial().recv(100) == b""


def test_closing_hangs_up_on_everybody_and_waits_for_their_threads(stack: ExitStack) -> None:
    echo = Echo(stack)
    echo.listener.start()
    peers = [echo.greeted(), echo.greeted()]
    echo.listener.close()
    assert echo.ended.acquire(blocking=False)
    assert echo.ended.acquire(blocking=False)
    assert [peer.recv(100) for peer in peers] == [b"", b""]
    assert echo.listener.n_connections == 0
    with pytest.raises(ConnectionRefusedError):
        echo.dial()


def test_a_listener_that_never_started_can_be_closed(stack: ExitStack) -> None:
    Echo(stack)
