"""Define the segment record, by which peers reach an engine, in the metadata store.

    halfmoon/segments/<name>  ->  {"name": …, "generation": …, "host_id": …, "endpoints": {…}}

The value is JSON. It is written when the engine opens and removed when it closes. It has
no region keys: those travel only to the peers that are meant to use them.
"""

import msgspec

PREFIX = "halfmoon/segments/"
#: Prefix of the counters that number the starts of engines opened without a generation.
GENERATIONS = "halfmoon/segment-generations/"
MAX_NAME_CHARS = 200


class Endpoint(msgspec.Struct, frozen=True):
    """The address at which one backend of an engine listens."""

    address: str
    #: The origin of the address, for the error message when it turns out to be wrong.
    origin: str = ""


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """The record by which peers find and reach one process's segment."""

    name: str
    #: A restarted process has a higher one.
    generation: int
    #: Engines with equal ids can pass file descriptors to each other.
    host_id: str
    #: By backend name. A backend that listens at several addresses has the others under
    #: "<name>/1", "<name>/2", …: its *rails*.
    endpoints: dict[str, Endpoint]

    def rails(self, backend: str) -> tuple[Endpoint, ...]:
        """Return all endpoints of one backend, in the order of their rails."""
        found = [self.endpoints[backend]] if backend in self.endpoints else []
        while (name := rail_name(backend, len(found))) in self.endpoints and found:
            found.append(self.endpoints[name])
        return tuple(found)


def rail_name(backend: str, index: int) -> str:
    """Return the name under which a rail's endpoint is published."""
    return f"{backend}/{index}" if index else backend


def check_segment_name(name: str) -> str:
    """Return `name` if it may name a segment.

    Raises:
        ValueError: it is empty, too long, or holds unprintable characters.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"a segment name has 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.80}"
        )
    return name


def encode(descriptor: SegmentDescriptor) -> bytes:
    """Encode a descriptor as the value in the metadata store."""
    return msgspec.json.encode(descriptor)


def decode(value: bytes) -> SegmentDescriptor:
    """Decode a descriptor.

    Raises:
        ValueError: the value is not a descriptor.
    """
    try:
        return msgspec.json.decode(value, type=SegmentDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a segment descriptor: {error}") from None
