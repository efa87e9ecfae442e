"""Choose TCP ports before a server listens on them.

A server that can, lets the system choose while it binds (port 0). Other servers must be told
their port, seconds before they bind it. Meanwhile Linux may assign the same port to a connection
or to another listener. A connection's port stays taken for a minute after its end. So these
ports come from below the range that Linux assigns by itself (ip(7), `ip_local_port_range`). No
process gets the same port twice.
"""

import random
import socket
from pathlib import Path

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Begin of the range where the system does not state it: Linux's default.
_USUAL_BEGIN = 32_768

_given: set[int] = set()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port without a listener that the system does not assign by itself.

    Where the system's range covers all ports, return one from that range.
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
