"""Hold the numbered events of one stream, from some number on.

Events are numbered from 1. Each is held as it is sent, with its ``id:`` line.
"""

from halfmoon_conductor.http_server.resumption_headers import EventId


class EventLog:
    """Number events and hold them until `trim`."""

    def __init__(self, body_tag: str) -> None:
        self._body_tag = body_tag
        self._events: list[bytes] = []
        self._ids: list[EventId] = []
        #: Number of the last event that is no longer held.
        self._n_trimmed = 0
        #: Bytes of the events that are held.
        self.n_bytes = 0

    @property
    def n_events(self) -> int:
        """Events so far; also the number of the last one."""
        return self._n_trimmed + len(self._events)

    def append(self, data: bytes, token_tag: str) -> int:
        """Number the events in `data`, and hold them; return their bytes.

        Args:
            data: one event or several, each with the empty line that ends it.
            token_tag: of the tokens that these events and all earlier ones tell of.
        """
        n_before = self.n_bytes
        # No event's data has a line end, so an empty line ends an event.
        for event in data.split(b"\n\n")[:-1]:
            event_id = EventId(self.n_events + 1, self._body_tag, token_tag)
            self._ids.append(event_id)
            self._events.append(b"id: %s\n%s\n\n" % (str(event_id).encode(), event))
            self.n_bytes += len(self._events[-1])
        return self.n_bytes - n_before

    def id_of(self, number: int) -> EventId | None:
        """Return the id of an event; None if there is no such event yet."""
        index = number - self._n_trimmed - 1
        assert index >= 0, "it is still held"
        return self._ids[index] if index < len(self._ids) else None

    def after(self, number: int) -> bytes:
        """Return all events after this number, one after the other."""
        assert number >= self._n_trimmed, "they are still held"
        return b"".join(self._events[number - self._n_trimmed :])

    def trim(self, number: int) -> None:
        """Drop the events before this number."""
        n = min(number - 1 - self._n_trimmed, len(self._events))
        if n > 0:
            self.n_bytes -= sum(map(len, self._events[:n]))
            del self._events[:n], self._ids[:n]
            self._n_trimmed += n
