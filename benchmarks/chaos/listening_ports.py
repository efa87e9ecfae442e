"""Find the TCP ports at which a service listens, and the service at the other end of a connection.

The kernel lists both in `/proc`, so that no service has to tell its ports.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

#: An IPv6 socket may carry IPv4, as those of ZeroMQ do.
_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_MAPPED = "0000000000000000FFFF0000"
_LISTENS = "0A"


def listening_ports(addresses: frozenset[str]) -> set[tuple[str, int]]:
    """Return the pairs of address and port that are listened at, of these addresses."""
    found = (_address(local) for local, _, state, _ in _rows(_LISTENS) if state == _LISTENS)
    return {(host, port) for host, port in found if host in addresses}


def owner_of(near: tuple[str, int], far: tuple[str, int], pids: Mapping[str, int]) -> str:
    """Return the name of the process whose connection goes from `near` to `far`.

    Args:
        near: address and port of its own end.
        far: address and port that it dialled.
        pids: process ids by name; empty: it is none of these.
    """
    inodes = {
        f"socket:[{inode}]"
        for local, remote, _, inode in _rows(f"{near[1]:04X}")
        if _address(local) == near and _address(remote) == far
    }
    return next((name for name, pid in pids.items() if not inodes.isdisjoint(_links(pid))), "")


def _links(pid: int) -> Iterator[str]:
    """Yield what the open files of a process are; none once it has ended."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield str(entry.readlink())
    except OSError:
        return


def _rows(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield own end, other end, state and inode of each TCP socket with this text in its row."""
    for table in _TABLES:
        for line in table.read_text().splitlines()[1:]:
            if text not in line:
                continue  # a busy machine has thousands
            fields = line.split()
            yield fields[1], fields[2], fields[3], fields[9]


def _address(text: str) -> tuple[str, int]:
    """Parse the kernel's form, such as 0100007F:1F90 for 127.0.0.1:8080, or IPv4 within IPv6."""
    host, port = text.removeprefix(_MAPPED).split(":")
    return ".".join(str(each) for each in reversed(bytes.fromhex(host))), int(port, 16)
