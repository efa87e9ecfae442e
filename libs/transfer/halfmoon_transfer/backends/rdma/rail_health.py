"""Track the health of all rails for all links, and repair failed rails in a thread.

A repair uses a link of its own that carries nothing else. It dials the peer, connects new queue
pairs and sends an empty write through them. After the write's completion the rail cools down. Then
all links use it again and connect their own queue pairs anew.

A peer that can't be dialled says nothing about the rail, so its rails are forgotten: the next link
to the peer tries them again.
"""

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from halfmoon_transfer.backends.rdma.rail_state import RailPhase, RailState
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor

_log = logging.getLogger(__name__)


class RailEndpoints(msgspec.Struct, frozen=True):
    """A rail by its ends: our device, and the peer's device with its address."""

    local: str
    remote: str
    remote_gid: str

    def __str__(self) -> str:
        return f"rail {self.local} to {self.remote} ({self.remote_gid})"


class RdmaPeerGone(Exception):
    """A peer that can't be reached, or is another segment than wanted."""


class NothingListening(RdmaPeerGone):
    """A peer whose address takes no connections; nothing was sent."""


class RailFailed(Exception):
    """A rail that does not work; the text says why."""


#: Tries a rail to a peer; raises `RdmaPeerGone` or `RailFailed`.
RepairAttempt = Callable[[RailEndpoints, SegmentDescriptor], None]


class RailHealth:
    """The states of failed rails. Methods are safe from any thread."""

    def __init__(self, name: str, try_rail: RepairAttempt) -> None:
        self._name = name
        self._try = try_rail
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Rails that have failed once, with their peers.
        self._states: dict[RailEndpoints, tuple[RailState, SegmentDescriptor]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def usable(self, pair: RailEndpoints) -> bool:
        """Return whether slices may be posted on a rail now."""
        with self._lock:
            known = self._states.get(pair)
            return known is None or known[0].usable(time.monotonic())

    def impaired(self) -> dict[RailEndpoints, RailPhase]:
        """Return the rails that may not be used now."""
        with self._lock:
            now = time.monotonic()
            return {
                pair: state.phase
                for pair, (state, _) in self._states.items()
                if not state.usable(now)
            }

    def on_failed(self, pair: RailEndpoints, peer: SegmentDescriptor, reason: str) -> None:
        """Record that an operation failed on a rail."""
        with self._changed:
            if self._closed:
                return
            state, _ = self._states.get(pair, (RailState(), peer))
            self._states[pair] = state, peer
            if not state.on_failed(time.monotonic(), reason):
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        _log.warning("%s is out: %s", pair, reason)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            pair, state, peer = due
            try:
                self._try(pair, peer)
            except RdmaPeerGone:
                with self._lock:
                    # A new peer at the same address starts without a record.
                    self._states.pop(pair, None)
            except RailFailed as failed:
                with self._lock:
                    state.on_repair_failed(time.monotonic(), str(failed))
                _log.debug("%s is still out: %s", pair, failed)
            else:
                with self._lock:
                    wait_s = state.on_repaired(time.monotonic())
                _log.warning("%s works again; used in %.1f s", pair, wait_s)

    def _next_due(self) -> tuple[RailEndpoints, RailState, SegmentDescriptor] | None:
        """Wait for a repair that is due; None when closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for pair, (state, peer) in self._states.items():
                    if state.begin_repair(now):
                        return pair, state, peer
                times = [
                    state.at for state, _ in self._states.values() if state.phase is RailPhase.OUT
                ]
                self._changed.wait(min(times) - now if times else None)
            return None

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            for state, _ in self._states.values():
                state.check()
