"""Whole buffers in and out of blocking sockets, in as few system calls as can be."""

import socket
from collections.abc import Sequence

#: Buffers per system call that every kernel takes (IOV_MAX).
_MAX_BUFFERS = 1024


class Closed(ConnectionError):
    """The other side hung up; `clean` when nothing of the wanted bytes had come."""

    def __init__(self, *, clean: bool) -> None:
        super().__init__("the peer hung up" if clean else "the peer hung up in the middle")
        self.clean = clean


def tune(sock: socket.socket) -> None:
    """Send at once, and notice within about two minutes that the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all of these, in order.

    Raises:
        OSError: the connection broke.
    """
    left = [memoryview(buffer) for buffer in buffers]
    first = 0
    while first < len(left):
        n_sent = sock.sendmsg(left[first : first + _MAX_BUFFERS])
        first = _advance(left, first, n_sent)


def receive_into(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill all of these, in order.

    Raises:
        Closed: the peer hung up before.
        OSError: the connection broke.
    """
    left = list(buffers)
    first = 0
    any_received = False
    while first < len(left):
        if first == len(left) - 1:
            n_received = sock.recv_into(left[first], 0, socket.MSG_WAITALL)
        else:
            window = left[first : first + _MAX_BUFFERS]
            n_received = sock.recvmsg_into(window, 0, socket.MSG_WAITALL)[0]
        if n_received == 0:
            raise Closed(clean=not any_received)
        any_received = True
        first = _advance(left, first, n_received)


def receive(sock: socket.socket, n_bytes: int) -> memoryview:
    """Exactly so many bytes; the caller has checked that it is not too many.

    Raises:
        Closed: the peer hung up before.
        OSError: the connection broke.
    """
    buffer = memoryview(bytearray(n_bytes))
    if n_bytes:
        receive_into(sock, [buffer])
    return buffer


def _advance(left: list[memoryview], first: int, n_done: int) -> int:
    """Step over what is done; the index of the first buffer that is not."""
    while first < len(left) and n_done >= len(left[first]):
        n_done -= len(left[first])
        first += 1
    if n_done:
        left[first] = left[first][n_done:]
    return first
