"""Read the processor time of processes and of all their children from `/proc`."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(services: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """Return the processor seconds so far of each service, user and system.

    Args:
        services: process ids by service; their children count, those that have ended too.
    """
    times, children = _all_processes()
    return {
        service: sum(_tree_seconds(pid, times, children) for pid in pids)
        for service, pids in services.items()
    }


def _tree_seconds(pid: int, times: Mapping[int, float], children: Mapping[int, list[int]]) -> float:
    below = sum(_tree_seconds(child, times, children) for child in children.get(pid, ()))
    return times.get(pid, 0.0) + below


def _all_processes() -> tuple[dict[int, float], dict[int, list[int]]]:
    """Return the processor seconds of all processes, and their children, by process id."""
    times: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        pid = int(folder.name)
        children[int(fields[1])].append(pid)
        times[pid] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return times, children
