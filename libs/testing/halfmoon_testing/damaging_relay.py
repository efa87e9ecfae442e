"""Relay TCP connections to a server, and damage bytes of its answers once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

#: Bytes read at once.
_CHUNK = 64 * 1024


class DamagingRelay:
    """Listen on a port of its own, and pass bytes on in both directions."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        #: Where connections are passed on to; set before the first one.
        self.target: tuple[str, int] | None = None
        #: Bytes of which the first is inverted when they come from the server; empty: none.
        self.pattern = b""
        self.n_damaged = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def damage_next(self, pattern: bytes) -> None:
        """Damage the next chunk from the server that has this pattern in it, once."""
        self.pattern = pattern

    def close(self) -> None:
        """Accept no more connections; open ones end with their sockets."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            assert self.target is not None, "a connection before there is a target"
            far = socket.create_connection(self.target)
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, is_answer), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with ExitStack() as stack:
            stack.callback(_hang_up, sink)
            with suppress(OSError):
                while data := source.recv(_CHUNK):
                    sink.sendall(self._damaged(data) if is_answer else data)

    def _damaged(self, data: bytes) -> bytes:
        at = data.find(self.pattern) if self.pattern else -1
        if at < 0:
            return data
        self.pattern = b""
        self.n_damaged += 1
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@contextmanager
def damaging_relay() -> Iterator[DamagingRelay]:
    """Yield a relay that is closed at the end of the block."""
    relay = DamagingRelay()
    try:
        yield relay
    finally:
        relay.close()


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
