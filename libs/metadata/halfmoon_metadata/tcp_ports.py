"""TCP ports that are chosen before anyone listens on them.

Whoever can lets the system choose while it binds (port 0). A server that must be told its port is
another matter: between the choice and its bind, which takes seconds, Linux may give the same port
to a connection or to another listener, and a connection's port stays taken a minute beyond its
end. So these come from below the range that Linux gives out by itself (ip(7),
`ip_local_port_range`), and no process is given one twice.
"""

import random
import socket
from pathlib import Path

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Where the range begins when the system does not say: Linux's own choice.
_USUAL_BEGIN = 32_768

_given: set[int] = set()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether one could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on just now, and that the system gives to nobody.

    Where the system gives out all of them, it is one that it would give.
    """
    ours = range(_LOWEST, _begin_of_range())
    for port in random.sample(ours, len(ours)):
        if port not in _given and is_free(port, host):
            _given.add(port)
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _begin_of_range() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_BEGIN
