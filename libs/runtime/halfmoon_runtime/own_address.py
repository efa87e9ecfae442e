"""This machine's own address in a network: what a container is told instead of an address.

A container learns its addresses when it starts, so whoever writes its settings can name the
networks it is on, and not the addresses.
"""

import ipaddress
import socket


def resolve_own_address(host: str) -> str:
    """An address as it is; a network such as "10.0.1.0/24" as this machine's address in it.

    Raises:
        ValueError: it is no network, or this machine has no address in it.
    """
    if "/" not in host:
        return host
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ValueError(f"{host!r} is no network, such as 10.0.1.0/24: {error}") from error
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel only looks for the way there, and with it for the sender.
            probe.connect((str(network[1]), 9))
            address = str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(f"this machine has no way into {host}: {error.strerror}") from error
    if ipaddress.ip_address(address) not in network:
        raise ValueError(f"this machine has no address in {host}: it would go there by {address}")
    return address
