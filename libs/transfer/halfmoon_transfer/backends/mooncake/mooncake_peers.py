"""Whom the "mooncake" backend can talk to, told by the endpoints of a descriptor. Pure.

    mooncake            handshake port of one of our own engines
    mooncake-v1, -v2    data port, and the version that is spoken there

A foreign segment has a data port only.
"""

from halfmoon_transfer.backends.mooncake.mooncake_frames import FrameVersion
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor

#: By the data port's endpoint.
VERSIONS: dict[str, FrameVersion] = {"mooncake-v2": 2, "mooncake-v1": 1}
#: Of a foreign segment's name in our descriptors.
PREFIX = "mooncake:"


def reaches(peer: SegmentDescriptor) -> bool:
    """Whether it has a data port."""
    return any(each in peer.endpoints for each in VERSIONS)


def foreign_descriptor(
    name: str, generation: int, address: str, version: FrameVersion
) -> SegmentDescriptor:
    """The descriptor of a foreign segment."""
    endpoint = Endpoint(address, "its Mooncake record")
    return SegmentDescriptor(PREFIX + name, generation, "", {f"mooncake-v{version}": endpoint})


def is_halfmoon(peer: SegmentDescriptor) -> bool:
    """Whether it is one of our own engines."""
    return "mooncake" in peer.endpoints


def data_endpoint(peer: SegmentDescriptor) -> tuple[str, Endpoint]:
    """Its data port: a key of `VERSIONS`, and the address."""
    return next((name, peer.endpoints[name]) for name in VERSIONS if name in peer.endpoints)


def describe_peer(peer: SegmentDescriptor) -> str:
    """Name and address, for messages."""
    name, endpoint = data_endpoint(peer)
    return f"segment {peer.name} at {endpoint.address} ({name}; {endpoint.origin})"


def failure_hint(peer: SegmentDescriptor) -> str:
    """What else a broken connection may mean."""
    if data_endpoint(peer)[0] == "mooncake-v1":
        return "; version 1 also refuses addresses in this way"
    return ""
