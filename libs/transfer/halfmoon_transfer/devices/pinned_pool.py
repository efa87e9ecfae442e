"""Lend runs of a device's pinned host memory, through which its bytes pass.

The pool has a fixed size, so pinned memory is bounded, and a NIC registers it once. When all of it
is lent, our own transfers wait, and requests of peers use other memory (see `device_region`).
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
    """Allocator of runs in one block of memory. All methods are safe from any thread."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        #: Per unit of the memory: 1 while it is lent.
        self._lent = bytearray(len(memory) // _UNIT_BYTES)
        self._free = threading.Condition()

    @property
    def n_bytes(self) -> int:
        """Size of the pool in bytes."""
        return len(self._lent) * _UNIT_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent now."""
        return self._lent.count(0) * _UNIT_BYTES

    def take(self, n_bytes: int, *, reserve: int = 0) -> PinnedRun | None:
        """Lend a run of `n_bytes` if one is free and at least `reserve` bytes remain; else None."""
        with self._free:
            return self._take(n_bytes, reserve)

    def wait(self, n_bytes: int, stop: StopSignal) -> PinnedRun | None:
        """Wait for a run of `n_bytes`, at most the pool's size; None when stopped before."""
        assert n_bytes <= self.n_bytes
        found: PinnedRun | None = None
        with stop.calling_on_stop(self._wake), self._free:
            while found is None and not stop.stopped:
                found = self._take(n_bytes, 0)
                if found is None:
                    self._free.wait()
        return found

    def _take(self, n_bytes: int, reserve: int) -> PinnedRun | None:
        count = max(1, -(-n_bytes // _UNIT_BYTES))
        if self.free_bytes < count * _UNIT_BYTES + reserve:
            return None
        first = self._lent.find(bytes(count))
        if first < 0:
            return None
        self._lent[first : first + count] = b"\1" * count
        offset = first * _UNIT_BYTES
        return PinnedRun(offset, self._memory[offset : offset + n_bytes])

    def release(self, run: PinnedRun) -> None:
        """Take a run back; nothing reads or writes it any more."""
        count = max(1, -(-len(run.view) // _UNIT_BYTES))
        first = run.offset // _UNIT_BYTES
        with self._free:
            assert self._lent[first : first + count] == b"\1" * count, "released twice"
            self._lent[first : first + count] = bytes(count)
            self._free.notify_all()

    def _wake(self) -> None:
        with self._free:
            self._free.notify_all()
