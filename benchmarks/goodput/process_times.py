"""Read the processor time of processes and all their descendants, from /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(roots: Iterable[int]) -> float:
    """Return the seconds that these processes and their living descendants have taken."""
    parents: dict[int, int] = {}
    taken: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        taken[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    wanted = set(roots)
    return sum(seconds for pid, seconds in taken.items() if _descends(pid, wanted, parents))


def _descends(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False
