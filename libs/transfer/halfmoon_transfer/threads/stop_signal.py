"""Stop the threads that carry a transfer which was cancelled or is overdue.

A thread checks `stopped` between slices. Where it blocks on a socket it registers a *kick*, which
wakes it. A kick is called at once when the signal is set, and never after its block was left.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class StopSignal:
    """The signal of one transfer, shared by all threads that carry its batches."""

    def __init__(self, deadline: float) -> None:
        #: Deadline of the transfer, on the monotonic clock.
        self.deadline = deadline
        self.stopped = False
        #: The current wait, for the text of a timeout: "waiting for segment x at y".
        self.doing = ""
        self._kicks: list[Callable[[], None]] = []
        # Held while kicks run: leaving `calling_on_stop` waits for them.
        self._lock = threading.Lock()

    @classmethod
    def after(cls, seconds: float) -> "StopSignal":
        """Make a signal whose deadline is so many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def set(self) -> None:
        """Stop, and wake all blocked threads. Kicks must be quick and must not raise."""
        with self._lock:
            self.stopped = True
            for kick in self._kicks:
                kick()

    @contextmanager
    def calling_on_stop(self, kick: Callable[[], None]) -> Generator[None]:
        """Call `kick` if the signal is set, before or during the block."""
        with self._lock:
            self._kicks.append(kick)
            if self.stopped:
                kick()
        try:
            yield
        finally:
            with self._lock:
                self._kicks.remove(kick)
