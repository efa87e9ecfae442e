"""Open ZeroMQ sockets as docs/protocol.md describes them, with CURVE where there is a key."""

import contextlib

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from halfmoon_protocol.curve_secrets import curve_secrets

#: A kit's socket keeps so much of what a subject sends, so that only a check makes a slow reader.
_QUEUE_MESSAGES = 20_000
_HEARTBEAT_MS = 1000
_TIMEOUT_MS = 3000
_NEVER_MS = 24 * 3600 * 1000

Context = zmq.asyncio.Context


def open_socket(context: Context, kind: int, *, queue: int = _QUEUE_MESSAGES) -> zmq.asyncio.Socket:
    """Open a socket with the protocol's heartbeats that never reconnects by itself."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.LINGER, 200)
    return socket


def secure_caller(socket: zmq.asyncio.Socket, cluster_key: str) -> None:
    """Encrypt a socket that will connect; without a key, do nothing."""
    if not cluster_key:
        return
    secrets = curve_secrets(cluster_key)
    caller = z85.encode(secrets.caller)
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(secrets.port)))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(caller))
    socket.setsockopt(zmq.CURVE_SECRETKEY, caller)


def secure_port(socket: zmq.asyncio.Socket, cluster_key: str) -> None:
    """Encrypt a socket that will bind; without a key, do nothing.

    It lets in any caller that knows the port's public key: the kit tests others, not itself.
    """
    if not cluster_key:
        return
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(curve_secrets(cluster_key).port))


class HandshakeWatch:
    """Record what becomes of a socket's connections, to explain why nothing comes."""

    def __init__(self, socket: zmq.asyncio.Socket, cluster_key: str) -> None:
        """Watch a socket that has not connected yet."""
        self._socket = socket
        self._with_curve = "with CURVE" if cluster_key else "without CURVE"
        self._events = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )

    async def fault(self) -> str:
        """Say why the socket has no connection; "" if it has, or had, one."""
        seen = set()
        with contextlib.suppress(zmq.Again):
            while True:
                frames = await self._events.recv_multipart(zmq.NOBLOCK)
                seen.add(parse_monitor_message(frames)["event"])
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in seen:
            return ""
        if zmq.EVENT_CONNECTED not in seen:
            return "; no TCP connection to the socket was made"
        return (
            f"; ZeroMQ's handshake failed, {self._with_curve} at the kit's side: has the socket "
            "the keys of docs/protocol.md#curve, with a cluster key alone?"
        )

    def close(self) -> None:
        """Stop watching; the socket may be closed already."""
        if not self._socket.closed:
            self._socket.disable_monitor()


def bind_free_port(socket: zmq.asyncio.Socket) -> str:
    """Bind to a free port of loopback and return the endpoint."""
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
