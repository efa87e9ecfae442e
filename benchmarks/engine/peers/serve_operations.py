"""Answer operations, one JSON line each, and sleep in between."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds after which a forward is not repeated any more, and the most repeats.
_ENOUGH_S = 0.6
_MOST_REPEATS = 5


def take_stdout() -> int:
    """Return a copy of the standard output; what libraries print goes to the standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(answers: int, ready: dict[str, Any], operations: dict[str, Callable[..., Any]]) -> None:
    """Print `ready`, then answer lines until the standard input ends.

    Args:
        answers: file descriptor to answer to.
        ready: the first line.
        operations: by name; a line has the name as "op", and arguments. An exception is
            answered as "error".
    """
    with os.fdopen(answers, "w", buffering=1) as output:
        print(json.dumps(ready), file=output)
        for line in sys.stdin:
            given = json.loads(line)
            try:
                result = operations[given.pop("op")](**given)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(result), file=output)


class Clock:
    """Times work: by the wall, or by the processor time of this process per thread.

    Processor time is worth reading where other programs are running, and where waiting threads
    sleep rather than spin.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._threads = threads
        self.now = self._cpu_s if name == "cpu" else time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes."""
        began = self.now()
        work()
        return self.now() - began

    def repeated(self, once: Callable[[], object]) -> list[float]:
        """Return the seconds of each call of `once`, until enough of them have been spent."""
        seconds: list[float] = []
        while len(seconds) < _MOST_REPEATS and sum(seconds) < _ENOUGH_S:
            seconds.append(self.seconds(once))
        return seconds

    def _cpu_s(self) -> float:
        return time.process_time() / self._threads


def resident_bytes(field: str = "VmRSS") -> int:
    """Return this process's resident memory; VmHWM: the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Begin the peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")
