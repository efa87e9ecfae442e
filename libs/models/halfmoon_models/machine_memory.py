"""Read the machine's memory, the limits of this process's control groups, and what is free.

A limit may stand at any level: a container sees its own as the root's, a unit of systemd has one
further down.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_ROOT = Path("/")
#: Groups between a process and the root at the most.
_MAX_DEPTH = 32


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of memory that this process and those beside it may have."""

    #: The machine's, or the least limit of a control group; None: unknown.
    total: int | None
    #: What can still be taken without pushing anything out; None: unknown.
    available: int | None
    #: Whether the limit is a control group's, such as a container's own.
    is_limited: bool = False


@dataclass(frozen=True)
class _Group:
    limit: int
    used: int


def machine_memory_bytes() -> int | None:
    """Return the machine's memory or the container's limit, the lesser; None if unknown."""
    return read_memory().total


def read_memory(root: Path = _ROOT) -> MachineMemory:
    """Return the machine's memory as this process may use it.

    Args:
        root: of the file system that the kernel reports in.
    """
    lines = _fields(root / "proc/meminfo")
    there, free = lines.get("MemTotal"), lines.get("MemAvailable")
    groups = [group for group in _groups(root) if there is None or group.limit < there]
    totals = [group.limit for group in groups] + ([] if there is None else [there])
    frees = [max(0, group.limit - group.used) for group in groups]
    return MachineMemory(
        min(totals, default=None),
        min(frees + ([] if free is None else [free]), default=None),
        bool(groups),
    )


def process_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that this process and its children hold, without shared memory; 0: unknown.

    Memory that a process shares with a child counts twice.
    """
    own = os.getpid() if root == _ROOT else "self"
    pids = [str(own)]
    for path in (root / f"proc/{own}/task").glob("*/children"):
        pids += _text(path).split()
    fields = [_fields(root / f"proc/{pid}/status") for pid in pids]
    return sum(each.get("RssAnon", 0) + each.get("RssFile", 0) for each in fields)


def _groups(root: Path) -> Iterator[_Group]:
    """Return the memory limits of the control groups that this process is in, and their use."""
    memory = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _limits(memory, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(memory / "memory", path, *names)


def _limits(top: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[_Group]:
    """Return the groups with a limit, from the root of a hierarchy down to a path."""
    parts = [part for part in path.split("/") if part and part != ".."][:_MAX_DEPTH]
    for depth in range(len(parts) + 1):
        folder = top.joinpath(*parts[:depth])
        if (most := _number(_text(folder / limit))) is None:
            continue
        used = _number(_text(folder / usage)) or 0
        # The kernel drops such pages before it calls the group's memory exhausted.
        droppable = 0
        for line in _text(folder / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                droppable = _number(value) or 0
        yield _Group(most, max(0, used - droppable))


def _fields(path: Path) -> dict[str, int]:
    """Return the sizes in a file of lines such as ``MemTotal:  123 kB``, in bytes."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and (kib := _number(words[0])) is not None:
            found[name] = kib * _KIB
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    stripped = text.strip()
    return int(stripped) if stripped.isdigit() and stripped.isascii() else None
