"""Server-sent events out of bytes, however they were cut on the way.

Of the format (https://html.spec.whatwg.org/multipage/server-sent-events.html) this reads what
endpoints send: lines that end in LF or CRLF, `data` fields, comments. Names and ids of events
are passed over.
"""

from halfmoon_cli.endpoint.endpoint_errors import StreamBroken

#: One event's bytes at the most; log probabilities of a long prompt come as one.
MAX_EVENT_BYTES = 64 << 20


class SseReader:
    """Takes bytes as they come, gives the data of each event that is complete."""

    def __init__(self) -> None:
        #: The beginning of a line whose end has not come.
        self._rest = b""
        #: Data fields of an event whose end has not come.
        self._data: list[bytes] = []
        self._n_held = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that these bytes complete.

        Raises:
            StreamBroken: one event is larger than anything that makes sense.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ").removesuffix(b"\r")
                self._data.append(value)
                self._n_held += len(value)
            elif line in (b"", b"\r") and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
                self._n_held = 0
        if self._n_held + len(self._rest) > MAX_EVENT_BYTES:
            raise StreamBroken(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        return events
