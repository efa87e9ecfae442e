"""Hold the numbered events of one stream, from some number on.

Events are numbered from 1. Each is held as it is sent, with its ``id:`` line.
"""

from halfmoon_conductor.http_server.resumption_headers import EventId

_ID = b"id: "


class EventLog:
    """Number events and hold them until `trim`."""

    def __init__(self, body_tag: str) -> None:
        self._body_tag = body_tag
        self._events: list[bytes] = []
        #: Number of the last event that is no longer held.
        self._n_trimmed = 0
        #: Bytes of the events that are held.
        self.n_bytes = 0

    @property
    def n_events(self) -> int:
        """Events so far; also the number of the last one."""
        return self._n_trimmed + len(self._events)

    def append(self, data: bytes, token_tag: str) -> None:
        """Number the events in `data`, and hold them.

        Args:
            data: one event or several, each with the empty line that ends it.
            token_tag: of the tokens that these events and all earlier ones tell of.
        """
        # No event's data has a line end, so an empty line ends an event.
        for event in data.split(b"\n\n")[:-1]:
            event_id = EventId(self.n_events + 1, self._body_tag, token_tag)
            numbered = b"%s%s\n%s\n\n" % (_ID, str(event_id).encode(), event)
            self._events.append(numbered)
            self.n_bytes += len(numbered)

    def id_of(self, number: int) -> str | None:
        """Return the id of an event; None if there is no such event yet."""
        index = number - self._n_trimmed - 1
        assert index >= 0, "it is still held"
        if index >= len(self._events):
            return None
        event = self._events[index]
        return event[len(_ID) : event.index(b"\n")].decode()

    def after(self, number: int, max_bytes: int) -> tuple[bytes, int]:
        """Return the events after this number, and the number of the last of these.

        Args:
            number: less than `n_events`, and not trimmed.
            max_bytes: most bytes of these events, unless the first one alone is longer.
        """
        first = number - self._n_trimmed
        assert 0 <= first < len(self._events)
        end, n_bytes = first + 1, len(self._events[first])
        while end < len(self._events) and n_bytes + len(self._events[end]) <= max_bytes:
            n_bytes += len(self._events[end])
            end += 1
        return b"".join(self._events[first:end]), self._n_trimmed + end

    def trim(self, number: int) -> None:
        """Drop the events before this number."""
        n = min(number - 1 - self._n_trimmed, len(self._events))
        if n > 0:
            self.n_bytes -= sum(map(len, self._events[:n]))
            del self._events[:n]
            self._n_trimmed += n
