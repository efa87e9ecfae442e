"""Parse and build addresses: "10.0.0.5", "node-3:7100", "::1", "[fd00::5]:7100"."""

import ipaddress
import socket

from halfmoon_transfer.metadata.descriptor import Endpoint


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Return host and port of an address.

    Raises:
        ValueError: it is neither "host" nor "host:port".
    """
    host, port = address, ""
    if address.startswith("["):
        host, bracket, port = address[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"{address!r} is not an address: write [IPv6]:port")
        port = port[1:]
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    if not host:
        raise ValueError(f"{address!r} is not an address: there is no host in it")
    if not port:
        return host, default_port
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address: {port!r} is no port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Build an address that `split_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_address(bind: str, port: int, advertise: str | None) -> Endpoint:
    """Return the endpoint that peers should dial, and the reason for it.

    Raises:
        ValueError: `advertise` is not an address, or none is given and none can be guessed.
    """
    if advertise is not None:
        host, port = split_address(advertise, port)
        return Endpoint(
            join_address(host, port), f"set by advertise={advertise!r}, bound to {bind}"
        )
    try:
        wildcard = ipaddress.ip_address(bind).is_unspecified
    except ValueError:
        wildcard = False
    if not wildcard:
        return Endpoint(join_address(bind, port), "the address that it is bound to")
    host = _outward_host(socket.AF_INET6 if ":" in bind else socket.AF_INET)
    return Endpoint(join_address(host, port), f"guessed from the default route, bound to {bind}")


def _outward_host(family: socket.AddressFamily) -> str:
    """Return our address on the default route; connecting a datagram socket sends nothing."""
    somewhere = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((somewhere, 9))
        except OSError as error:
            raise ValueError(
                f"bound to all addresses and there is no default route to guess from ({error}): "
                "say with advertise= what peers should dial"
            ) from None
        return str(probe.getsockname()[0])
