"""How a segment is reached: the record that its engine keeps in the metadata store.

    halfmoon/segments/<name>  ->  {"name": …, "generation": …, "host_id": …, "endpoints": {…}}

JSON, without a lease: it is written when the engine opens and removed when it closes. It has
no region keys: those travel only to the peers that are meant to use them.
"""

import msgspec

PREFIX = "halfmoon/segments/"
#: Where generations are counted for engines that are opened without one.
GENERATIONS = "halfmoon/segment-generations/"
MAX_NAME_CHARS = 200


class Endpoint(msgspec.Struct, frozen=True):
    """Where one backend of an engine listens."""

    address: str
    #: How the address came about, for the message when it turns out to be wrong.
    origin: str = ""


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """One process's segment, as its peers find it."""

    name: str
    #: A restarted process has a higher one.
    generation: int
    #: Engines with equal ids can pass file descriptors to each other.
    host_id: str
    #: By backend name. A backend that listens at several addresses has the others under
    #: "<name>/1", "<name>/2", …: its *rails*.
    endpoints: dict[str, Endpoint]

    def rails(self, backend: str) -> tuple[Endpoint, ...]:
        """All endpoints of one backend, the first one first."""
        found = [self.endpoints[backend]] if backend in self.endpoints else []
        while (name := rail_name(backend, len(found))) in self.endpoints and found:
            found.append(self.endpoints[name])
        return tuple(found)


def rail_name(backend: str, index: int) -> str:
    """What a backend's endpoint is published as."""
    return f"{backend}/{index}" if index else backend


def check_segment_name(name: str) -> str:
    """Return `name` if it may name a segment.

    Raises:
        ValueError: empty, too long, or with characters that would not print.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"a segment name has 1 to {MAX_NAME_CHARS} printable characters, not {name!r:.80}"
        )
    return name


def encode(descriptor: SegmentDescriptor) -> bytes:
    """The record's value."""
    return msgspec.json.encode(descriptor)


def decode(value: bytes) -> SegmentDescriptor:
    """The record, read.

    Raises:
        ValueError: it is not one.
    """
    try:
        return msgspec.json.decode(value, type=SegmentDescriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a segment descriptor: {error}") from None
