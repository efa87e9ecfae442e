"""Which of our open connections is whose, so that a peer can have old ones ended.

A connection that its initiator has given up may still hold bytes of a write: in our buffers,
in the network, in something in between that stopped forwarding for a while. They must not land
after the same slice has come again over another connection, and perhaps been written over since.
So an initiator gives each connection a number within its session, and with the hello of the
next one it names those that it gave up in the middle of a write. They are cut off, and the
hello is answered only once nobody reads from them any more.
"""

import threading
from collections.abc import Callable, Iterable

#: Cutting off wakes whoever reads; what is left to it is to take in what had arrived.
_END_S = 5.0


class TcpSessions:
    """The greeted connections of all listeners of one engine."""

    def __init__(self) -> None:
        #: By session and number: how to hang up. Whoever serves it leaves when it has ended.
        self._open: dict[tuple[bytes, int], Callable[[], None]] = {}
        self._changed = threading.Condition()

    def enter(self, session: bytes, number: int, hang_up: Callable[[], None]) -> None:
        """A connection says who it is. `hang_up` must be quick and must not raise."""
        with self._changed:
            self._open[session, number] = hang_up

    def leave(self, session: bytes, number: int) -> None:
        """Nothing is read from it any more."""
        with self._changed:
            self._open.pop((session, number), None)
            self._changed.notify_all()

    def end(self, session: bytes, numbers: Iterable[int]) -> bool:
        """Hang up on these and wait for their end; whether that came in time."""
        keys = [(session, number) for number in numbers]
        with self._changed:
            for key in keys:
                if key in self._open:
                    self._open[key]()
            return self._changed.wait_for(lambda: not self._open.keys() & set(keys), _END_S)
