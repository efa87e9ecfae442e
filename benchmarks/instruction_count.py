"""Count the instructions that processes execute, by `perf stat`; they repeat on a busy machine."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping

#: Seconds that `perf` takes to attach.
_ATTACH_S = 0.3


class InstructionCount:
    """Count user-mode instructions of services from now until `stop`.

    Args:
        services: process ids by service; children are not counted.
    """

    def __init__(self, services: Mapping[str, Iterable[int]]) -> None:
        perf = shutil.which("perf")
        self._running: dict[str, subprocess.Popen[str]] = {}
        for service, pids in services.items() if perf else ():
            command = [perf or "", "stat", "-x,", "-e", "instructions:u", "-p"]
            self._running[service] = subprocess.Popen(
                [*command, ",".join(map(str, pids))], stderr=subprocess.PIPE, text=True
            )
        if perf:
            time.sleep(_ATTACH_S)

    def stop(self) -> dict[str, int]:
        """Return the instructions by service; empty where they can't be counted."""
        counts: dict[str, int] = {}
        for service, perf in self._running.items():
            perf.send_signal(signal.SIGINT)
            _, report = perf.communicate()
            for line in report.splitlines():
                value = line.partition(",")[0]
                if "instructions" in line and value.isdecimal():
                    counts[service] = int(value)
        return counts
