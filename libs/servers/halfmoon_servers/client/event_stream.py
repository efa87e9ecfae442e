"""Split a stream of server-sent events into the data of its events, within a bound.

Each ``data:`` line is one event. OpenAI-compatible servers write JSON on one line.
"""

#: The data of the last event.
DONE = b"[DONE]"


class EventTooLong(ValueError):
    """A line over the bound."""


class EventLines:
    """The unread rest of a stream."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        #: The begin of a line whose end has not come; never longer than `max_line_bytes`.
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes, and return the data of the events that they complete.

        Raises:
            EventTooLong: a line has more than `max_line_bytes`.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if max(map(len, lines), default=0) > self._max_line_bytes or (
            len(self._rest) > self._max_line_bytes
        ):
            raise EventTooLong(f"a line of over {self._max_line_bytes} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
