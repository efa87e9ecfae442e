"""Find the network interface over which the kernel routes to an address."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def nic_towards(host: str) -> str:
    """Return the interface's name; "" if there is no route, or the address is IPv6."""
    try:
        # Connecting a datagram socket sends nothing, but makes the kernel choose.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == own:
                    return name
            # Every 127.x.y.z belongs to the loopback interface.
            return "lo" if own[0] == 127 else ""
    except OSError:
        return ""


def _address_of(sock: socket.socket, card: str) -> bytes:
    request = struct.pack("32s", card.encode())
    try:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return b""
    address: bytes = struct.unpack_from("20x4s", answer)[0]
    return address
