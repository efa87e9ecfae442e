"""Notice Ctrl-C and SIGTERM, for commands that go on until they are stopped."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Remember that a signal came, and end a wait for it.

    A handler runs between any two steps of the main thread, so it takes no lock: `threading.Event`
    would wait for ever where the signal comes inside of its own `wait`.
    """

    def __init__(self, *, interrupting: bool) -> None:
        self._interrupting = interrupting
        self._reader, self._writer = os.pipe()
        self._came = False

    def wait(self, seconds: float | None) -> bool:
        """Wait for one, at most so long (None: for ever); return whether one came."""
        if not self._came:
            select.select([self._reader], [], [], seconds)
        return self._came

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: it is the first, and the block wants to be interrupted. Python drops
                that inside of a destructor or a callback: `wait` returns at once all the same.
        """
        if self._came:
            return
        self._came = True
        os.write(self._writer, b"\0")
        if self._interrupting:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Free both ends of the pipe."""
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def catch_stop_signals(*, interrupting: bool = False) -> Iterator[StopSignals]:
    """Catch Ctrl-C and SIGTERM while the block runs.

    Args:
        interrupting: also raise KeyboardInterrupt in the block, for the first of them.
    """
    stop = StopSignals(interrupting=interrupting)
    before = {number: signal.signal(number, stop.on_signal) for number in _STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
