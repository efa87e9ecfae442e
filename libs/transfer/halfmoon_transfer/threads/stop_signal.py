"""Stop the threads that carry a transfer which was cancelled or is overdue.

A thread checks `stopped` between slices. Where it blocks on a socket it registers a *kick*, which
wakes it. A kick is called at once when the signal is set, and never after its block was left.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager


class StopSignal:
    """The signal of one transfer, shared by all threads that carry its batches."""

    def __init__(self, deadline: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        #: Deadline of the transfer, on that clock.
        self.deadline = deadline
        self.stopped = False
        #: The current wait, for the text of a timeout: "waiting for segment x at y".
        self.doing = ""
        #: Whether bytes may be moved just now; None: always. Called from any thread.
        self.may_go_on: Callable[[], bool] | None = None
        self._kicks: list[Callable[[], None]] = []
        # Held while kicks run: leaving `calling_on_stop` waits for them.
        self._lock = threading.Lock()

    @classmethod
    def after(cls, seconds: float) -> "StopSignal":
        """Make a signal whose deadline is so many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - self._now())

    @property
    def is_held(self) -> bool:
        """Return whether no bytes may be moved just now."""
        return self.may_go_on is not None and not self.may_go_on()

    def set(self) -> None:
        """Stop, and wake all blocked threads. Kicks must be quick and must not raise."""
        with self._lock:
            self.stopped = True
            for kick in self._kicks:
                kick()

    def calling_on_stop(self, kick: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `kick` if the signal is set, before or during the block."""
        return _KickRegistration(self, kick)

    def add_kick(self, kick: Callable[[], None]) -> None:
        """Call `kick` when the signal is set, or at once if it is; until `remove_kick`."""
        with self._lock:
            self._kicks.append(kick)
            if self.stopped:
                kick()

    def remove_kick(self, kick: Callable[[], None]) -> None:
        """Forget a kick; returns once no call of it runs."""
        with self._lock:
            self._kicks.remove(kick)


class _KickRegistration:
    """A block during which a kick is registered. 1.8 µs; a generator takes 3.2."""

    __slots__ = ("_kick", "_stop")

    def __init__(self, stop: StopSignal, kick: Callable[[], None]) -> None:
        self._stop = stop
        self._kick = kick

    def __enter__(self) -> None:
        self._stop.add_kick(self._kick)

    def __exit__(self, *_: object) -> None:
        self._stop.remove_kick(self._kick)
