"""Read from a descriptor's endpoints if and how the "mooncake" backend reaches a peer. Pure.

    mooncake            handshake port of a Halfmoon engine
    mooncake-v1, -v2    data port, and its protocol version

A foreign segment has a data port only.
"""

from halfmoon_transfer.backends.mooncake.mooncake_frames import FrameVersion
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor

#: Protocol version by the name of the data port's endpoint.
VERSIONS: dict[str, FrameVersion] = {"mooncake-v2": 2, "mooncake-v1": 1}
#: Prefix of a foreign segment's name in our descriptors.
PREFIX = "mooncake:"


def reaches(peer: SegmentDescriptor) -> bool:
    """Return True if the peer has a data port."""
    return any(each in peer.endpoints for each in VERSIONS)


def foreign_descriptor(
    name: str, generation: int, address: str, version: FrameVersion
) -> SegmentDescriptor:
    """Build the descriptor of a foreign segment."""
    endpoint = Endpoint(address, "its Mooncake record")
    return SegmentDescriptor(PREFIX + name, generation, "", {f"mooncake-v{version}": endpoint})


def is_halfmoon(peer: SegmentDescriptor) -> bool:
    """Return True if the peer is a Halfmoon engine."""
    return "mooncake" in peer.endpoints


def data_endpoint(peer: SegmentDescriptor) -> tuple[str, Endpoint]:
    """Return the peer's data port: a key of `VERSIONS`, and the address."""
    return next((name, peer.endpoints[name]) for name in VERSIONS if name in peer.endpoints)


def describe_peer(peer: SegmentDescriptor) -> str:
    """Describe a peer by name and address, for error messages."""
    name, endpoint = data_endpoint(peer)
    return f"segment {peer.name} at {endpoint.address} ({name}; {endpoint.origin})"


def failure_hint(peer: SegmentDescriptor) -> str:
    """Return a hint on other causes of a broken connection; may be empty."""
    if data_endpoint(peer)[0] == "mooncake-v1":
        return "; version 1 also refuses addresses in this way"
    return ""
