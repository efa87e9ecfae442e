"""Tell which addresses are this machine's own: in a network, and on loopback.

A container gets its addresses when it starts. So its settings can name its networks, but not its
addresses.
"""

import ipaddress
import re
import socket

#: What is often written in place of a host.
_WITH_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):[0-9]*")
_MAX_NAME = 253
_SHOWN = 100


def resolve_own_address(host: str) -> str:
    """Return an address unchanged, and a network such as "10.0.1.0/24" as our address in it.

    Raises:
        ValueError: `host` is no address, name or network, this machine has no address in it, or
            the name does not resolve.
    """
    if "/" not in host or "://" in host:
        check_host_form(host)
        _check_resolves(host)
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


def check_host_form(host: str) -> None:
    """Refuse what is neither an address nor a name, such as one with a port.

    Raises:
        ValueError: the text says what is wrong.
    """
    if not host or _is_address(host):
        return
    shown = repr(host[:_SHOWN])
    if "://" in host:
        raise ValueError(f"{shown} is a URL: name the host alone, without scheme and port")
    if host.startswith("[") and host.endswith("]"):
        raise ValueError(f"{shown} is in brackets: write the address alone, {host[1:-1][:_SHOWN]}")
    if _WITH_PORT.fullmatch(host):
        raise ValueError(
            f"{shown} has a port: name the host alone, {host.rpartition(':')[0][:_SHOWN]}; each "
            "port has a setting of its own"
        )
    if set(host) <= set("0123456789."):
        _check_old_form(host)  # no name has these characters alone
    elif len(host) > _MAX_NAME or not all(each.isalnum() or each in "._-" for each in host):
        raise ValueError(f"{shown} is no name of a host and no IP address")


def check_dialled_host(host: str) -> None:
    """Refuse what peers can't dial: what is no host, and the address that stands for all.

    Raises:
        ValueError: the text says what is wrong.
    """
    check_host_form(host)
    if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
        raise ValueError(
            f"{host!r} stands for all addresses and can't be dialled: name one of this machine"
        )


def _check_old_form(host: str) -> None:
    """Refuse numbers that are no address, not even a short one such as 127.1."""
    try:
        socket.inet_aton(host)
    except OSError as error:
        raise ValueError(
            f"{host!r} is no IP address: name one of this machine, or a network such as 10.0.1.0/24"
        ) from error


def _check_resolves(host: str) -> None:
    if not host or _is_address(host):
        return
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{host!r} does not resolve on this machine ({reason}): name an address of it such as "
            "127.0.0.1, or a network such as 10.0.1.0/24"
        ) from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; of names, localhost alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
