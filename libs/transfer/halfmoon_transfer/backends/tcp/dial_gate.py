"""Dial each address in one thread at a time, and pause after failures.

While one thread dials an address, others wait for its result. After a failure the address is not
dialled for a pause, which doubles with each failure in a row. During the pause the last error is
returned at once. An address that accepts again has no pause.
"""

import threading
import time
from collections.abc import Callable

from halfmoon_transfer.backends.socket_io import SocketClosed
from halfmoon_transfer.backends.tcp.lane import Lane
from halfmoon_transfer.backends.tcp.tcp_frames import TcpFrameError
from halfmoon_transfer.threads.stop_signal import StopSignal

#: A start of a segment, and one of its addresses.
DialTarget = tuple[str, int, str]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
#: Addresses remembered; beyond that, those whose pause is over are forgotten.
_MAX_FAILED = 256
#: Errors of a connection to a live peer; the next connection may succeed.
_PASSING = (SocketClosed, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


class DialFailed(Exception):
    """An address that takes no connections; nothing was sent."""


class _Failed:
    """The last failures of one address."""

    def __init__(self, reason: str, pause_s: float, until: float) -> None:
        self.reason = reason
        self.pause_s = pause_s
        self.until = until


class DialGate:
    """The gate of one backend. Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._dialling: set[DialTarget] = set()
        self._failed: dict[DialTarget, _Failed] = {}

    def through(self, place: DialTarget, stop: StopSignal, dial: Callable[[], Lane]) -> Lane:
        """Dial, or wait for another thread that does, or fail like the last attempt.

        Raises:
            DialFailed: there is no answer, or there was none a moment ago.
            Exception: what else `dial` raises.
        """
        with stop.calling_on_stop(self._wake):
            is_first = self._enter(place, stop)
        try:
            lane = dial()
        except _PASSING:
            raise
        except (OSError, TcpFrameError, ValueError) as error:
            # An attempt that we cut short says nothing about the peer.
            if stop.stopped or stop.remaining_s() == 0.0:
                raise
            self._note(place, str(error))
            raise DialFailed(str(error)) from error
        else:
            with self._changed:
                self._failed.pop(place, None)
            return lane
        finally:
            if is_first:
                self._leave(place)

    def forget(self, segment: str) -> None:
        """Dial this segment's addresses without a pause."""
        with self._changed:
            for place in [place for place in self._failed if place[0] == segment]:
                del self._failed[place]

    def _enter(self, place: DialTarget, stop: StopSignal) -> bool:
        """Wait for another thread that dials the address; return whether to dial it now."""
        with self._changed:
            waited = False
            while place in self._dialling and not stop.stopped and stop.remaining_s() > 0.0:
                self._changed.wait(stop.remaining_s())
                waited = True
            failed = self._failed.get(place)
            if failed is not None and time.monotonic() < failed.until:
                raise DialFailed(failed.reason)
            if waited:
                return False
            self._dialling.add(place)
            return True

    def _leave(self, place: DialTarget) -> None:
        with self._changed:
            self._dialling.discard(place)
            self._changed.notify_all()

    def _note(self, place: DialTarget, reason: str) -> None:
        now = time.monotonic()
        with self._changed:
            known = self._failed.get(place)
            pause_s = _FIRST_PAUSE_S
            if known is not None:
                pause_s = min(2 * known.pause_s, _LONGEST_PAUSE_S)
            if len(self._failed) >= _MAX_FAILED:
                self._failed = {p: each for p, each in self._failed.items() if each.until > now}
            self._failed[place] = _Failed(reason, pause_s, now + pause_s)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
