"""Keep accepted connections by session and number, so that a peer can have old ones ended.

A connection that its initiator gave up may still hold bytes of a write, in our buffers or in the
network. Meanwhile the initiator sends the slice again over another connection. The old bytes must
not land after that: the region may have been written again since.

So an initiator numbers the connections of its session. With the next hello it names those that it
gave up in the middle of a write. They are cut off, and the hello is answered only when no thread
reads from them any more.
"""

import threading
from collections.abc import Callable, Iterable

#: A cut wakes the reading thread, which may still take in bytes that had arrived.
_END_S = 5.0


class TcpSessions:
    """The greeted connections of all listeners of one engine."""

    def __init__(self) -> None:
        #: Function to hang up, by session and number, from `enter` to `leave`.
        self._open: dict[tuple[bytes, int], Callable[[], None]] = {}
        self._changed = threading.Condition()

    def enter(self, session: bytes, number: int, hang_up: Callable[[], None]) -> None:
        """Record a greeted connection. `hang_up` must be quick and must not raise."""
        with self._changed:
            self._open[session, number] = hang_up

    def leave(self, session: bytes, number: int) -> None:
        """Forget a connection from which nothing is read any more."""
        with self._changed:
            self._open.pop((session, number), None)
            self._changed.notify_all()

    def end(self, session: bytes, numbers: Iterable[int]) -> bool:
        """Hang up on these connections; return whether all ended in time."""
        keys = [(session, number) for number in numbers]
        with self._changed:
            for key in keys:
                if key in self._open:
                    self._open[key]()
            return self._changed.wait_for(lambda: not self._open.keys() & set(keys), _END_S)
