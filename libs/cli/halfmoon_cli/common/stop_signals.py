"""Turn Ctrl-C and SIGTERM into an event, for commands that serve until they are stopped."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def catch_stop_signals() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set while the block runs."""
    ended = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
