"""Accept connections and serve each in a thread: the one accept loop of the backends that dial.

TCP, RDMA and Mooncake all listen through it. It bounds, times out and ends connections; the
function that serves a connection speaks the protocol.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from halfmoon_transfer.backends.socket_io import hang_up, tune_socket

_log = logging.getLogger(__name__)
#: Without descriptors, `accept` fails at once and again: pause instead of spinning.
_ACCEPT_PAUSE_S = 0.1


class SocketListener:
    """Listens at `bind`:`port`; accepts from `start` on, and until `close`.

    Args:
        serve: called in a thread of its own with each connection, which is closed after it.
            May raise OSError, and `malformed` for bytes of no protocol, which is counted.
        farewell: makes the message, given a reason, to a peer that is turned away because
            `max_connections` are open. It is sent if that needs no waiting.
        stall_timeout_s: after so long without a byte, reading and writing raise
            BlockingIOError. These are the kernel's timeouts, so one call can still wait for a
            whole buffer.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        *,
        malformed: type[Exception],
        farewell: Callable[[str], bytes] | None = None,
        bind: str,
        port: int,
        label: str,
        max_connections: int,
        stall_timeout_s: float,
    ) -> None:
        self.n_malformed = 0
        self._serve = serve
        self._malformed = malformed
        self._farewell = farewell
        self._label = label
        self._max_connections = max_connections
        seconds = int(stall_timeout_s)
        self._timeout = struct.pack("@ll", seconds, int((stall_timeout_s - seconds) * 1e6))
        #: Open connections with the threads that serve them.
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, port), family=family, backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"{label}-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept; peers that dialled since construction have waited."""
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def hang_up(self, sock: socket.socket) -> None:
        """Wake the thread that serves this connection; do nothing if it has ended."""
        with self._lock:
            if sock in self._connections:
                hang_up(sock)

    def close(self) -> None:
        """Stop listening, close all connections, and wait for their threads."""
        with self._lock:
            self._closed = True
            threads = list(self._connections.values())
            for sock in self._connections:
                hang_up(sock)
        # Closing alone would not wake the thread that waits in accept.
        hang_up(self._socket)
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("%s: a peer could not connect: %s", self._label, error)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                if len(self._connections) >= self._max_connections:
                    reason = f"{len(self._connections)} connections are open, the limit"
                    self._turn_away(sock, reason)
                    continue
                thread = threading.Thread(
                    target=self._run, args=(sock,), name=f"{self._label}-serve", daemon=True
                )
                # Counted before it is served: a peer may have its answer before `start` returns.
                self._connections[sock] = thread
                try:
                    thread.start()
                except RuntimeError as error:  # the system allows no more threads
                    del self._connections[sock]
                    self._turn_away(sock, str(error))

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        """Refuse a connection; a message so short needs no thread of its own."""
        _log.warning("%s: a peer was rejected: %s", self._label, reason)
        with sock, contextlib.suppress(OSError):
            if self._farewell is not None:
                sock.send(self._farewell(reason), socket.MSG_DONTWAIT)

    def _run(self, sock: socket.socket) -> None:
        try:
            tune_socket(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, self._timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self._timeout)
            self._serve(sock)
        except self._malformed as error:
            with self._lock:
                self.n_malformed += 1
            _log.warning("%s: hanging up on a peer: %s", self._label, error)
        except OSError as error:
            _log.debug("%s: a connection ended: %s", self._label, error)
        finally:
            with self._lock:
                del self._connections[sock]
                sock.close()
