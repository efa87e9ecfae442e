"""Configure, bind, monitor and close ZeroMQ sockets; `socket_pump` reads and writes them."""

import struct
from dataclasses import dataclass

import zmq

from halfmoon_protocol.codec import MAX_MESSAGE_BYTES

#: Monitor events of a peer that does not speak ZeroMQ, or uses another security mechanism.
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)

#: First frame of a monitor's message, as zmq_socket_monitor(3) has it: event and value.
_MONITOR_EVENT = struct.Struct("=Hi")

#: Reconnect interval, longer than any link stays up unnoticed after a loss. libzmq must not
#: reconnect on its own: messages of a restarted worker would follow those of the dead one.
_NEVER_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class SocketSettings:
    """Bounds of a socket, in bytes, messages and seconds."""

    #: A longer frame is dropped; a much longer one closes the connection unread.
    max_message_bytes: int = MAX_MESSAGE_BYTES
    #: Answers and publications queued for one slow caller. When the queue is full, a send waits
    #: (ROUTER) or drops the message (PUB).
    send_queue_messages: int = 1024
    #: Commands queued for one worker (DEALER). A full queue ends the link, so there is room for all
    #: that one turn of a busy caller's event loop brings, as a cancel for each of its requests.
    #: A worker that takes none is found by its heartbeats.
    command_queue_messages: int = 16 * 1024
    #: Messages and bytes of one peer that are received and not yet read. What a caller sends beyond
    #: is dropped; a worker that sends more is hung up on, and its publications are dropped.
    unread_messages: int = 16 * 1024
    unread_bytes: int = 64 * 1024 * 1024
    heartbeat_interval_s: float = 1.0
    #: Seconds without an answer after which a peer counts as gone.
    heartbeat_timeout_s: float = 3.0
    #: Seconds after which a link that is not connected is down.
    connect_timeout_s: float = 5.0
    connect_retry_s: float = 0.1
    #: Seconds that messages still queued at the close have to leave.
    linger_s: float = 0.2


def configure(socket: "zmq.Socket[bytes]", settings: SocketSettings) -> None:
    """Set every bound on a socket, before it binds or connects."""
    socket.setsockopt(zmq.SNDHWM, settings.send_queue_messages)
    # A full queue ends the process in libzmq 4.3.5: when its peer leaves and a heartbeat is due
    # before there is room (https://github.com/zeromq/libzmq/issues/4841). So there is no limit
    # here, all is read at once, and what waits is counted in front of `receive`.
    socket.setsockopt(zmq.RCVHWM, 0)
    # The margin lets a frame that is a little too large be counted rather than cut off.
    socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes + 64 * 1024)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * settings.heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * settings.heartbeat_timeout_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * settings.connect_timeout_s))
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.LINGER, round(1000 * settings.linger_s))
    socket.setsockopt(zmq.IPV6, 1)


def bind_to_free_port(socket: "zmq.Socket[bytes]", host: str, advertise_host: str) -> str:
    """Bind to a free TCP port of `host`, and return the endpoint for callers.

    Raises:
        OSError: `host` is no address of this machine, or no port is free.
    """
    try:
        socket.bind(f"tcp://{_bracketed(host)}:*")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"can't bind to a port of {host!r}: {error.strerror}") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    port = bound.rstrip(b"\0").decode().rpartition(":")[2]
    return f"tcp://{_bracketed(advertise_host)}:{port}"


def close_sockets(*sockets: "zmq.Socket[bytes]") -> None:
    """Close sockets and monitors that no task reads any more; closing twice does no harm.

    A monitor is closed once nothing is sent to it. Before that, libzmq's thread would wait for
    ever to hand it an event, with a lock that closing the monitored socket needs.
    """
    still_open = [socket for socket in sockets if not socket.closed]
    for socket in still_open:
        socket.disable_monitor()
    for socket in still_open:
        socket.close()


def monitor_event(frames: list[bytes]) -> tuple[zmq.Event, str]:
    """Parse a monitor's message into the event and its endpoint.

    Its value is a descriptor, an errno or milliseconds. pyzmq's own parser makes a member of
    `zmq.Event` of each, and Python keeps all of them: half a kilobyte for each new one.
    """
    event, _ = _MONITOR_EVENT.unpack(frames[0])
    return zmq.Event(event), frames[1].decode(errors="replace")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
