"""What a monitor of a ZeroMQ socket says, and in which order both are closed."""

import struct
from typing import Any

import zmq

from halfmoon_runtime.channels.zmq_sockets import close_sockets, monitor_event


def frames(event: int, value: int) -> list[bytes]:
    return [struct.pack("=hi", event, value), b"tcp://127.0.0.1:7"]


def test_no_number_that_an_event_brings_is_kept() -> None:
    def n_kept() -> int:
        return len(zmq.Event._value2member_map_)

    before = n_kept()
    for value in range(1000, 3000):
        monitor_event(frames(zmq.EVENT_CONNECT_RETRIED, value))
    assert n_kept() == before


def test_an_event_of_a_real_socket_is_read() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    monitor = socket.get_monitor_socket(zmq.EVENT_LISTENING)
    try:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        found = monitor_event(monitor.recv_multipart())
        assert found == (zmq.EVENT_LISTENING, f"tcp://127.0.0.1:{port}")
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


class RecordingSocket(zmq.Socket[bytes]):
    """A socket that notes what is done to it."""

    def disable_monitor(self) -> None:
        DONE.append("disable")
        super().disable_monitor()

    def close(self, linger: Any = None) -> None:
        DONE.append("close")
        super().close(linger)


DONE: list[str] = []


def test_no_monitor_is_closed_while_events_may_still_be_sent_to_it() -> None:
    DONE.clear()
    context = zmq.Context()
    socket, monitor = (RecordingSocket(context, kind) for kind in (zmq.SUB, zmq.PAIR))
    close_sockets(monitor, socket)
    assert DONE == ["disable", "disable", "close", "close"]
    close_sockets(monitor, socket)
    assert len(DONE) == 4, "closing twice does no harm"
    context.term()
