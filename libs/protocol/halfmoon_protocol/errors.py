"""Define the errors of reading what a peer sent.

ProtocolError
├── UnknownVersion     the frame is of a version that this build does not speak
├── MessageTooLarge    the frame is over the limit
├── MalformedMessage   the frame is not a known message
└── LayoutMismatch     two workers would misread each other's KV bytes
"""


class ProtocolError(ValueError):
    """The base of all these errors; its text names the thing, the value and the limit."""


class UnknownVersion(ProtocolError):
    """A frame of a version that this build does not speak."""

    def __init__(self, got: int, text: str) -> None:
        super().__init__(text)
        #: The version of the frame.
        self.got = got


class MessageTooLarge(ProtocolError):
    """A frame over `codec.MAX_MESSAGE_BYTES`."""


class MalformedMessage(ProtocolError):
    """Bytes that are not one of the expected messages."""


class LayoutMismatch(ProtocolError):
    """Two workers whose KV bytes mean different things."""
