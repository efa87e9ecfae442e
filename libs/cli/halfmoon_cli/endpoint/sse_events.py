"""Parse server-sent events out of bytes, however they were cut on the way.

It reads the part of the format that endpoints send: lines that end in LF or CRLF, `data` fields,
comments. Names and ids of events are ignored. The format:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from halfmoon_cli.endpoint.endpoint_errors import StreamBroken

#: Most bytes of one event; the log probabilities of a long prompt are one event.
MAX_EVENT_BYTES = 64 << 20


class SseReader:
    """Incremental parser: takes bytes, gives the data of complete events."""

    def __init__(self) -> None:
        #: Bytes of an incomplete line.
        self._rest = b""
        #: Data fields of an incomplete event.
        self._data: list[bytes] = []
        self._n_held = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that these bytes complete.

        Raises:
            StreamBroken: an event is larger than `MAX_EVENT_BYTES`.
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
