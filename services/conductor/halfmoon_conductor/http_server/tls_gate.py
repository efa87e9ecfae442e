"""Do the TLS handshakes of HTTP connections, bounded in number and time.

A server of asyncio with a TLS context tells its protocol of a connection only after the handshake.
It waits a minute for that. Clients that never finish theirs would be neither counted nor closed in
time. So connections are accepted in the clear, and this protocol is told of each:

    connection ──far too many, and none is idle──► aborted
        └── handshake ──► the protocol of HTTP gets the connection
                └── it fails, or takes `handshake_s` ──► closed

A connection in its handshake counts like others. It can't be answered: HTTP comes later.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from halfmoon_conductor.http_server.idle_connections import IdleConnections

#: Seconds to wait for a client's own end of TLS once a connection is to be closed.
_SHUTDOWN_S = 2.0
#: Connections over the limit whose handshake is still done, so that HTTP can refuse them by name.
_REFUSED_BY_NAME = 64


class TlsGate(asyncio.Protocol):
    """One connection until its TLS handshake is over."""

    def __init__(
        self,
        make_http: Callable[[], asyncio.Protocol],
        connections: set[Any],
        tls: ssl.SSLContext,
        idle: IdleConnections,
        *,
        max_connections: int,
        handshake_s: float,
    ) -> None:
        """Prepare for a connection.

        Args:
            make_http: makes the protocol that gets the connection after the handshake.
            connections: all connections of the server, which ends each by its `shutdown`.
            tls: certificate and key.
            idle: those of the connections that give way to a new one.
            max_connections: most connections; some more are let through, for HTTP to refuse.
            handshake_s: seconds until the handshake must be over.
        """
        self._make_http = make_http
        self._connections = connections
        self._tls = tls
        self._idle = idle
        self._max_connections = max_connections
        self._handshake_s = handshake_s
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, unless there are far too many connections.

        The socket goes to a transport of its own. `loop.start_tls` would keep this one, and lose
        what it reads before it is TLS: uvloop reads at once, even if paused here.
        """
        clear = cast(asyncio.Transport, transport)
        if len(self._connections) >= self._max_connections:
            self._idle.make_room(self._connections)
        if len(self._connections) < self._max_connections + _REFUSED_BY_NAME:
            with suppress(OSError):  # no descriptor is left, or the client is gone
                taken = socket.socket(fileno=os.dup(clear.get_extra_info("socket").fileno()))
                taken.setblocking(False)
                self._connections.add(self)
                self._task = asyncio.get_running_loop().create_task(self._shake_hands(taken))
        clear.abort()

    def shutdown(self) -> None:
        """Abort the handshake, as the server stops."""
        if self._task is not None:
            self._task.cancel()

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):  # SSLError and timeouts too: the connection is closed
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_http,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=self._handshake_s,
                    ssl_shutdown_timeout=_SHUTDOWN_S,
                )
        finally:
            self._connections.discard(self)
