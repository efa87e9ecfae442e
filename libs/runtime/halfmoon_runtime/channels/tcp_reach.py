"""Try whether a TCP endpoint can be reached, and say in words why it can't."""

import asyncio
import os
import socket
from contextlib import suppress
from urllib.parse import urlsplit


async def tcp_fault(endpoint: str, limit_s: float) -> str:
    """Return why no connection to ``tcp://host:port`` is made; "" if one is made.

    Args:
        endpoint: of a port. What is not of that form is not tried: "".
        limit_s: seconds to wait for the connection.
    """
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if parts.scheme != "tcp" or not host or not port:
        return ""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection in {limit_s:g} s"
    except socket.gaierror as error:
        return f"the name {host} is not known here: {error.strerror}"
    except OSError as error:
        return _reason(error)
    except UnicodeError:
        return f"{host[:100]!r} is no name of a host"
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""


def _reason(error: OSError) -> str:
    """Return the system's words; of a name with several addresses asyncio joins the texts."""
    return str(error) if error.errno is None else os.strerror(error.errno).lower()
