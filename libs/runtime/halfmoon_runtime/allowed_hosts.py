"""Tell which names in the Host header of a request are a server's own.

A page elsewhere can have its name point to another address once it is loaded, for example to
127.0.0.1 ("DNS rebinding"). Its scripts then read what a server answers there, as a browser takes
both for one site. Such a request names the page's host and not ours. Addresses and `localhost`
can't be rebound, so they are always ours.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

#: A name that stands for all.
EVERY_HOST = "*"
#: A host by RFC 3986 (an address in brackets, or a name) with a port or none.
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]"
    r"|(?P<name>(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+))(?::(?P<port>[0-9]*))?"
)
#: A name as a setting writes it: labels, perhaps with `*.` before them.
_SETTING = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?")
_MAX_NAME, _MAX_PORT = 253, 65535
_SHOWN = 100
_HOSTS_FILE = Path("/etc/hosts")
#: Bytes of that file that are read: it may be large where it blocks advertisements.
_MAX_HOSTS_BYTES = 4 * 2**20


class BadHostHeader(ValueError):
    """A Host header that RFC 9112 has answered with 400; the text has the reason."""


def host_of(headers: Sequence[str], http_version: str) -> str | None:
    """Return the host that a request names, without port; None: an old request names none.

    Args:
        headers: all Host headers of the request.
        http_version: such as "1.1"; from this one on a request has a Host.

    Raises:
        BadHostHeader: it is missing, or there is another one, or it names no host.
    """
    if len(headers) > 1:
        raise BadHostHeader(f"The request has {len(headers)} Host headers: send one.")
    if headers:
        return read_host(headers[0])
    if http_version < "1.1":
        return None
    raise BadHostHeader("The request has no Host header, which HTTP/1.1 requires: send one.")


def read_host(value: str) -> str:
    """Return the host of a Host header in lower case, without port, brackets and last dot.

    Raises:
        BadHostHeader: it is not of the form name, name:port or [address]:port.
    """
    found = _HOST.fullmatch(value.strip(" \t"))
    shown = value[:_SHOWN]
    if found is None:
        raise BadHostHeader(f"The Host header {shown!r} is not of the form name or name:port.")
    if found["port"] and int(found["port"][:6]) > _MAX_PORT:
        raise BadHostHeader(f"The Host header {shown!r} has a port over {_MAX_PORT}.")
    if found["address"] is not None:
        if not _is_address(found["address"]):
            raise BadHostHeader(f"The Host header {shown!r} has no IPv6 address in its brackets.")
        return found["address"].lower()
    name = found["name"].lower().removesuffix(".")
    if not 0 < len(name) <= _MAX_NAME:
        raise BadHostHeader(f"The Host header {shown!r} has no name of 1 to {_MAX_NAME} letters.")
    return name


def read_allowed_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a list that is separated by commas, in the form that is compared.

    Raises:
        ValueError: one is no name of a host.
    """
    return tuple(_read_name(item) for item in (each.strip() for each in text.split(",")) if item)


def _read_name(item: str) -> str:
    if item == EVERY_HOST or _is_address(item.strip("[]")):
        return item.strip("[]").lower()
    try:
        name = item.lower().removesuffix(".")
        name = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError:
        name = ""
    if not _SETTING.fullmatch(name) or len(name) > _MAX_NAME:
        raise ValueError(
            f"{item[:_SHOWN]!r} is no name of a host: write names without http:// and port, as "
            "llm.example.com, *.example.com for all below it, or * for any"
        )
    return name


def own_names() -> tuple[str, ...]:
    """Return this machine's names: its host name, and those that its file of hosts has for it.

    The network is not asked: what answers there may not be ours.
    """
    host = socket.gethostname().lower().removesuffix(".")
    short = host.partition(".")[0]
    return tuple(dict.fromkeys([host, short, f"{short}.local", *_names_beside({host, short})]))


def _names_beside(names: set[str]) -> Iterable[str]:
    """Return the names that the file of hosts has in one line with one of these."""
    try:
        with _HOSTS_FILE.open("rb") as file:
            text = file.read(_MAX_HOSTS_BYTES).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        listed = line.partition("#")[0].lower().split()[1:]
        if names.intersection(listed):
            yield from listed


class AllowedHosts:
    """The names that a server answers to, besides addresses and `localhost`."""

    def __init__(self, names: Iterable[str]) -> None:
        """Prepare to compare.

        Args:
            names: as of `read_allowed_hosts`, without `EVERY_HOST`.
        """
        self._names = frozenset(names)

    def allows(self, host: str) -> bool:
        """Return whether a host, as of `read_host`, is this server's."""
        if host == "localhost" or host.endswith(".localhost") or host in self._names:
            return True
        above = host
        while above:
            _, _, above = above.partition(".")
            if f"*.{above}" in self._names:
                return True
        return _is_address(host)

    def refusal(self, host: str) -> str:
        """Return why a host that is not allowed is refused, with the way out."""
        shown = host[:_SHOWN]
        return (
            f"{shown!r} in the Host header is no name of this server, so a page of another site "
            f"may be asking. If the name is yours, start the server with --allowed-hosts {shown} "
            f"(HALFMOON_ALLOWED_HOSTS={shown}), or call it by its IP address."
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
