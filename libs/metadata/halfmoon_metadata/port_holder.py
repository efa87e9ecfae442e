"""Find the process that listens on a TCP port of this machine, for texts about a port in use."""

import errno
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"
#: Bytes of the kernel's table of sockets, and descriptors of processes, that are looked at.
_MAX_TABLE_BYTES = 8 << 20
_MAX_DESCRIPTORS = 200_000
#: Characters of a command line that are shown.
_MAX_COMMAND = 120
#: What a command line of a process of ours has: a service, or a command that starts services.
_SERVICE = re.compile(r"-m halfmoon_(conductor|prefill|decode|kvstore|servers)\b")
_STARTER = re.compile(r"\bhalfmoon(_cli)? (up|route)\b")


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port."""

    pid: int
    #: Its command line, shortened and printable.
    command: str
    #: Process of Halfmoon to stop: this one, or what started it; 0: it is no Halfmoon.
    halfmoon_pid: int = 0

    def __str__(self) -> str:
        text = f"process {self.pid} ({self.command})"
        if self.is_sibling:
            return f"{text} of the same Halfmoon"
        if self.halfmoon_pid not in (0, self.pid):
            return f"{text} of the Halfmoon that process {self.halfmoon_pid} started"
        return text

    @property
    def is_sibling(self) -> bool:
        """Return whether what started it has started this process too."""
        return self.halfmoon_pid not in (0, self.pid) and self.halfmoon_pid == os.getppid()

    @property
    def way_out(self) -> str:
        """Text that says how to stop it."""
        if self.is_sibling:
            return "give each service a port of its own"
        if self.halfmoon_pid:
            return f"stop that Halfmoon with `kill {self.halfmoon_pid}`"
        return "stop that process"


def port_refusal(setting: str, port: int, host: str, error: OSError) -> str:
    """Return the text of a service that can't listen on the port of a setting.

    Args:
        setting: its name.
        port: its value.
        host: address to listen on.
        error: of the system.
    """
    holder = find_holder(port) if error.errno == errno.EADDRINUSE else None
    return (
        f"{setting} {port} on {host} can't be had ({error.strerror}"
        f"{f' by {holder}' if holder else ''}): {way_out_of(holder)}, or choose another with "
        f"--{setting.replace('_', '-')}"
    )


def way_out_of(holder: PortHolder | None) -> str:
    """Return how to stop what listens on a port, known or not."""
    return holder.way_out if holder else "stop what has it"


def find_holder(port: int, proc: Path = _PROC) -> PortHolder | None:
    """Return the process that listens on a port; None: none does, or it is another user's.

    Args:
        port: of any address of this machine.
        proc: where the kernel shows its processes.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not wanted:
        return None
    for pid, link in itertools.islice(_descriptors(proc), _MAX_DESCRIPTORS):
        if link in wanted:
            return _holder(pid, proc)
    return None


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("net/tcp", "net/tcp6"):
        try:
            with (proc / table).open() as file:
                lines = file.read(_MAX_TABLE_BYTES).splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS:
                _, _, number = fields[1].rpartition(":")
                if number == f"{port:04X}":
                    yield fields[9]


def _descriptors(proc: Path) -> Iterator[tuple[int, str]]:
    """Return process ids, each with what one of its descriptors is; the newest process first."""
    pids = sorted(int(path.name) for path in proc.glob("[0-9]*") if path.name.isdecimal())
    for pid in reversed(pids):
        try:
            entries = os.scandir(proc / f"{pid}/fd")
        except OSError:  # another user's, or it has ended
            continue
        with entries:
            for entry in entries:
                try:
                    yield pid, os.readlink(entry.path)  # noqa: PTH115 (many of them)
                except OSError:
                    continue


def _holder(pid: int, proc: Path) -> PortHolder:
    command = _command(pid, proc)
    stop = 0
    if _SERVICE.search(command):
        parent = _parent(pid, proc)
        stop = parent if _STARTER.search(_command(parent, proc)) else pid
    elif _STARTER.search(command):
        stop = pid
    shown = command if len(command) <= _MAX_COMMAND else f"{command[: _MAX_COMMAND - 1]}…"
    return PortHolder(pid, shown or "its command line can't be read", stop)


def _command(pid: int, proc: Path) -> str:
    try:
        with (proc / f"{pid}/cmdline").open("rb") as file:
            text = file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _parent(pid: int, proc: Path) -> int:
    try:
        # The name in brackets may hold anything; what follows its last bracket is fixed.
        return int((proc / f"{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
