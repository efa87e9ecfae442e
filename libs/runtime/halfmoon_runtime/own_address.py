"""Tell which addresses are this machine's own: in a network, and on loopback.

A container gets its addresses when it starts. So its settings can name its networks, but not its
addresses.
"""

import ipaddress
import socket


def resolve_own_address(host: str) -> str:
    """Return an address unchanged, and a network such as "10.0.1.0/24" as our address in it.

    Raises:
        ValueError: `host` is an invalid address or network, or this machine has no address in it.
    """
    if "/" not in host:
        _check_address(host)
        return host
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ValueError(f"{host!r} is no network, such as 10.0.1.0/24: {error}") from error
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel only chooses the route, and with it the source address.
            probe.connect((str(network[1]), 9))
            address = str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(f"this machine has no way into {host}: {error.strerror}") from error
    if ipaddress.ip_address(address) not in network:
        raise ValueError(f"this machine has no address in {host}: it would go there by {address}")
    return address


def _check_address(host: str) -> None:
    """Refuse what can only be an address, as no name has these characters alone, and is none."""
    if not host or not set(host) <= set("0123456789."):
        return
    try:
        socket.inet_aton(host)
    except OSError as error:
        raise ValueError(
            f"{host!r} is no IP address: name one of this machine, or a network such as 10.0.1.0/24"
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; of names, localhost alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
