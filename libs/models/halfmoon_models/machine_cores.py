"""Count the cores that this process may compute on."""

import os
from collections.abc import Collection
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def machine_cores() -> int:
    """Return how many cores this process may use: those of its affinity, at most its quota.

    Hardware threads of one core count once: arithmetic gains nothing from the second.
    """
    return usable_cores(os.sched_getaffinity(0), _CPUS, _CGROUP)


def usable_cores(affinity: Collection[int], cpus: Path, cgroup: Path) -> int:
    """Return the number of usable cores, at least 1.

    Args:
        affinity: numbers of the hardware threads that the process may run on.
        cpus: /sys/devices/system/cpu.
        cgroup: /sys/fs/cgroup, with the container's limits.
    """
    # Each core by the list of its hardware threads; a thread without a list is a core.
    cores = {
        _text(cpus / f"cpu{cpu}/topology/thread_siblings_list") or f"{cpu}" for cpu in affinity
    }
    quota = _quota(cgroup)
    # A part of a core is left to the process's other threads: a quota that is used up stops all.
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the cores that a cgroup, version 2 or 1, may use on the average; None: all."""
    words = _text(cgroup / "cpu.max").split() or [
        _text(cgroup / "cpu/cpu.cfs_quota_us"),
        _text(cgroup / "cpu/cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return None  # "max", or -1 in version 1
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
