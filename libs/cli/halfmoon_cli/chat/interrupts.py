"""Raise KeyboardInterrupt in the blocks that handle it, and nowhere else.

An impatient user presses Ctrl-C twice: the second must not interrupt the handling of the first.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Handler of Ctrl-C while it is entered as a context manager, in the main thread."""

    def __init__(self) -> None:
        self._allowed = False
        self._before: signal._HANDLER = signal.SIG_DFL

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt in this block, once; elsewhere it does nothing."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
