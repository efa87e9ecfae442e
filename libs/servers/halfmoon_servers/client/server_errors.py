"""Define the errors of a request to a server.

ServerError
├── ServerGone        no connection, or closed before the answer began: try another server
├── AnswerBroken      the answer ended before its last token: go on at another server
├── ServerTooSlow     no byte within the limit: go on at another server
├── ServerGarbage     the answer is none of the protocol, or over a bound: go on elsewhere
├── ServerRefused     the server answered with an error status
└── NotServable       the server can't do what the request asks; nothing was sent
"""

#: Statuses by which a server says that the request itself is wrong.
_INVALID = frozenset({400, 413, 422})
_RETRYABLE = frozenset({408, 425, 429})
#: Characters of a server's message that are kept.
MAX_SERVER_MESSAGE = 1000


class ServerError(Exception):
    """The base of these errors; its text names the server, the fact and the limit."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(f"server {url}: {text[:MAX_SERVER_MESSAGE]}")
        self.url = url


class ServerGone(ServerError):
    """No connection, or one that closed before the answer began."""


class AnswerBroken(ServerError):
    """The answer ended before its last token."""


class ServerTooSlow(ServerError):
    """No byte came within the limit."""


class ServerGarbage(ServerError):
    """The answer is none of the protocol, or over a bound."""


class ServerRefused(ServerError):
    """The server answered with an error status, and perhaps with a time to wait."""

    def __init__(
        self, url: str, status: int, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(url, f"HTTP {status}: {message or 'no message'}")
        self.status = status
        self.message = message[:MAX_SERVER_MESSAGE]
        #: Seconds in which the server wants no request; None: it named none.
        self.retry_after_s = retry_after_s

    @property
    def invalid(self) -> bool:
        """True when the request is at fault, and no server would take it."""
        return self.status in _INVALID

    @property
    def retryable(self) -> bool:
        """True when the same server may take the request later."""
        return self.status in _RETRYABLE or self.status >= 500


class NotServable(ServerError):
    """The server can't do what a request asks; nothing was sent."""

    def __init__(self, url: str, field: str, reason: str) -> None:
        super().__init__(url, f"{field}: {reason}")
        self.field = field
        self.reason = reason
