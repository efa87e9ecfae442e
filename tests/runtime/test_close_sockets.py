"""The order in which sockets and their monitors are closed."""

from typing import Any

import zmq

from halfmoon_runtime.channels.zmq_sockets import close_sockets


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
