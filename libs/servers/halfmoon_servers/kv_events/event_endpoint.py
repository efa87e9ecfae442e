"""Define where a server publishes its KV events."""

import msgspec


class EventEndpoint(msgspec.Struct, frozen=True):
    """The two endpoints of one data-parallel rank, as a subscriber connects to them."""

    #: Publishes batches (PUB).
    endpoint: str
    #: Answers requests for earlier batches (ROUTER); None: lost batches can't be read again.
    replay_endpoint: str | None = None
    topic: str = ""
    #: The data-parallel rank.
    rank: int = 0
