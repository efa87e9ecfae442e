"""Pair local and remote devices to rails, by their addresses. Pure.

Rails are usually networks of their own, so the pair with the longest common prefix is on one wire.
A device of our own (both processes on this host) has all bits in common.
"""

import ipaddress
from collections.abc import Mapping

#: Common bits from which two addresses are surely on one network.
_SAME_NETWORK_BITS = 120


def pair_devices(local: Mapping[str, str], remote: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the rails between two nodes.

    Args:
        local: GIDs by device name; 8 groups of hex digits.
        remote: the GIDs of the peer, likewise.

    Returns:
        Names, local and remote. First each device has at most one partner, best match first;
        then devices left over, on either side, join the best partner on their network.
    """
    ranked = sorted(
        (
            (_common_bits(gid, other), name, far)
            for name, gid in local.items()
            for far, other in remote.items()
        ),
        key=lambda each: (-each[0], each[1], each[2]),
    )
    pairs: list[tuple[str, str]] = []
    for least_bits in (0, _SAME_NETWORK_BITS):
        for bits, name, far in ranked:
            used = any(name == near for near, _ in pairs), any(far == other for _, other in pairs)
            free = not any(used) if least_bits == 0 else not all(used)
            if bits >= least_bits and free:
                pairs.append((name, far))
    return pairs


def _common_bits(one: str, other: str) -> int:
    difference = int(ipaddress.IPv6Address(one)) ^ int(ipaddress.IPv6Address(other))
    return 128 - difference.bit_length()
