"""Read the limit of this process's memory."""

from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory_bytes() -> int | None:
    """Return the machine's memory or the container's limit, the lesser; None if unknown."""
    found = [limit for path in _CGROUP_LIMITS if (limit := _number(_text(path))) is not None]
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        kib = _number(rest.split()[0]) if name == "MemTotal" and rest.split() else None
        if kib is not None:
            found.append(kib * 1024)
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    stripped = text.strip()
    return int(stripped) if stripped.isdigit() else None
