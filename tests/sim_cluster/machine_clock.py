"""Note which of our modules read a clock of the machine.

A profiler hears of calls of a built-in function wherever its caller has it from: a default of an
argument as well as the module `time`. It does not hear of those in greenlets, so `time` is
replaced as well.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

_CLOCKS = ("monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns")


@contextmanager
def clock_reads() -> Iterator[set[str]]:
    """Collect module, function and clock of each read by a `halfmoon_*` module in the block."""
    reads: set[str] = set()
    names = {getattr(time, name): name for name in _CLOCKS}

    def note(frame: FrameType, clock: str) -> None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("halfmoon_"):
            reads.add(f"{module}:{frame.f_code.co_name} reads time.{clock}")

    def on_call(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called in names:
            note(frame, names[called])

    def noting(right: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            note(sys._getframe(1), names[right])
            return right()

        return read

    with pytest.MonkeyPatch.context() as patch:
        for clock, name in names.items():
            patch.setattr(time, name, noting(clock))
        sys.setprofile(on_call)
        try:
            yield reads
        finally:
            sys.setprofile(None)
