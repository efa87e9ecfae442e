"""Open ZeroMQ sockets as docs/protocol.md describes them, with CURVE where there is a key."""

import zmq
import zmq.asyncio
from zmq.utils import z85

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


def bind_free_port(socket: zmq.asyncio.Socket) -> str:
    """Bind to a free port of loopback and return the endpoint."""
    socket.bind("tcp://127.0.0.1:*")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
