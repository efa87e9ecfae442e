"""Pinned host memory of one device, lent in runs: what bytes pass through on their way.

One piece of a fixed size, so what is pinned is bounded, and a network card that needs it
registered registers it once. Never more is lent than there is: who comes when it is all lent
waits (our own transfers), or does with other memory (requests of peers, see `region`).
"""

import threading
from typing import NamedTuple

from halfmoon_transfer.threads.stop_signal import StopSignal

_UNIT_BYTES = 4096


class PinnedRun(NamedTuple):
    """A range that is lent."""

    offset: int
    view: memoryview


class PinnedPool:
    """Lends runs of `memory`."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        #: By unit: 1 while it is lent.
        self._lent = bytearray(len(memory) // _UNIT_BYTES)
        self._free = threading.Condition()

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return len(self._lent) * _UNIT_BYTES

    @property
    def free_bytes(self) -> int:
        """What is not lent now."""
        return self._lent.count(0) * _UNIT_BYTES

    def take(self, n_bytes: int, *, leaving: int = 0) -> PinnedRun | None:
        """A run of so many bytes, if there is one and so many more remain."""
        with self._free:
            return self._take(n_bytes, leaving)

    def wait(self, n_bytes: int, stop: StopSignal) -> PinnedRun | None:
        """A run of so many bytes, at most the pool's size; None when stopped before."""
        assert n_bytes <= self.n_bytes
        found: PinnedRun | None = None
        with stop.calling_on_stop(self._wake), self._free:
            while found is None and not stop.stopped:
                found = self._take(n_bytes, 0)
                if found is None:
                    self._free.wait()
        return found

    def _take(self, n_bytes: int, leaving: int) -> PinnedRun | None:
        count = max(1, -(-n_bytes // _UNIT_BYTES))
        if self.free_bytes < count * _UNIT_BYTES + leaving:
            return None
        first = self._lent.find(bytes(count))
        if first < 0:
            return None
        self._lent[first : first + count] = b"\1" * count
        offset = first * _UNIT_BYTES
        return PinnedRun(offset, self._memory[offset : offset + n_bytes])

    def give_back(self, run: PinnedRun) -> None:
        """It is not used any more."""
        count = max(1, -(-len(run.view) // _UNIT_BYTES))
        first = run.offset // _UNIT_BYTES
        with self._free:
            assert self._lent[first : first + count] == b"\1" * count, "given back twice"
            self._lent[first : first + count] = bytes(count)
            self._free.notify_all()

    def _wake(self) -> None:
        with self._free:
            self._free.notify_all()
