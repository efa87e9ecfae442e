"""A listening socket and a thread per accepted connection, for both of the ports."""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from halfmoon_transfer.backends.mooncake.frames import FrameError
from halfmoon_transfer.backends.tcp.sockets import tune

_log = logging.getLogger(__name__)
#: Out of descriptors, accepting fails at once and again: don't spin.
_ACCEPT_PAUSE_S = 0.1


class Listener:
    """Accepts, bounds, and ends connections; what is said on them is `serve`'s business.

    `serve` may raise FrameError (counted) and OSError; the socket is closed after it.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        *,
        bind: str,
        port: int,
        label: str,
        max_connections: int,
        stall_timeout_s: float,
    ) -> None:
        self.n_malformed = 0
        self._serve = serve
        self._label = label
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        self._connections: set[socket.socket] = set()
        #: Threads that serve them, and some that have just ended.
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, port), family=family, backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"{label}-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept; those who dialled since it was made have waited."""
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def hang_up(self, sock: socket.socket) -> None:
        """Wake the thread that serves this connection; nothing if it has ended."""
        with self._lock:
            if sock in self._connections:
                _shut(sock)

    def close(self) -> None:
        """Stop listening and hang up on everybody."""
        with self._lock:
            self._closed = True
            threads = self._threads
            for sock in self._connections:
                _shut(sock)
        # Closing alone would not wake the thread that waits in accept.
        _shut(self._socket)
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
                    _log.warning(
                        "%s: a peer was turned away: %d connections are open, the limit",
                        self._label,
                        len(self._connections),
                    )
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._run, args=(sock,), name=f"{self._label}-serve", daemon=True
                )
                self._connections.add(sock)
                thread.start()
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _run(self, sock: socket.socket) -> None:
        try:
            tune(sock)
            # The kernel's own timeouts, so that one call can still wait for a whole buffer.
            seconds = int(self._stall_timeout_s)
            patience = struct.pack("@ll", seconds, int((self._stall_timeout_s - seconds) * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            self._serve(sock)
        except FrameError as error:
            with self._lock:
                self.n_malformed += 1
            _log.warning("%s: hanging up on a peer: %s", self._label, error)
        except OSError as error:
            _log.debug("%s: a connection ended: %s", self._label, error)
        finally:
            with self._lock:
                self._connections.discard(sock)
                sock.close()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
