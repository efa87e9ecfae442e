"""Choose the port of the REST API, and say what holds one that was asked for."""

from halfmoon_metadata.port_holder import find_holder, way_out_of
from halfmoon_metadata.tcp_ports import free_port, is_free

#: Ports after one in use that are looked at for another one.
_NEAR = 20


class PortInUse(Exception):
    """Another process listens on the port; the text names it and the ways out."""


def choose_http_port(asked: int, usual: int, *, by_make: bool = False) -> int:
    """Return the port to listen on.

    Args:
        asked: what the user wants; 0: the usual one, or another where that is in use.
        usual: port where it is free.
        by_make: whether a target of make runs the command too.

    Raises:
        PortInUse: the port that was asked for is taken.
    """
    if not asked:
        return usual if is_free(usual) else free_port()
    if is_free(asked):
        return asked
    holder = find_holder(asked)
    near = (port for port in range(asked + 1, min(asked + _NEAR, 65535)) if is_free(port))
    other = next(near, None) or free_port()
    with_make = f" (make up PORT={other})" if by_make else ""
    raise PortInUse(
        f"port {asked} is in use{f' by {holder}' if holder else ''}: {way_out_of(holder)}, or"
        f" choose another port with --port {other}{with_make}"
    )
