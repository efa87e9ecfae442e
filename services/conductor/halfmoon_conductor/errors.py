"""What a client is told when it gets no tokens, and with which status.

ApiError
├── InvalidRequest       400  the request itself is wrong; `param` names the field
│   ├── Harmful          400  workers were lost while they computed it; it is not tried again
│   ├── NotSupported     400  a known field that asks for what Halfmoon does not do
│   ├── TooLong          400  more tokens than the model, or any worker, can hold
│   └── TooCostly        400  making tokens of it takes more time or memory than one may
├── InvalidKey           401  no API key, or none that is valid here
├── NotPermitted         403  a valid key, and no operator's
├── ModelNotFound        404  another model than the one served here
├── TooSlow              408  headers or body did not arrive in time
├── BodyTooLarge         413  more bytes than the front accepts
├── UrlTooLong           414  the same of the URL
├── HeadTooLarge         431  the same of the headers
├── Overloaded           429  refused now so that others keep their latency; retry later
├── RateLimited          429  this tenant asks more than it may; retry later
├── GenerationFailed     500  it began and could not be finished
└── Unavailable          503  nobody is there to serve it; retry later

The gateway raises `ContextLengthExceeded`, `ServerOverloaded` and `ServiceUnavailable` before the
first token, and
`GenerationFailed` and `InvalidRequest` at any time. How these look on the wire is
`error_responses`.
"""

from typing import ClassVar


class ApiError(Exception):
    """The base of all of these: `message` is meant for the client's eyes."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        #: The field of the request that is to blame.
        self.param = param
        #: Seconds after which trying again may help; None when it won't.
        self.retry_after_s = retry_after_s


class InvalidRequest(ApiError):
    """The request itself is wrong; the same request will fail again."""

    status = 400
    kind = "invalid_request_error"


class NotSupported(InvalidRequest):
    """A known field with a value that asks for what Halfmoon does not do."""

    code = "not_supported"


class ContextLengthExceeded(InvalidRequest):
    """More tokens than the model's context, or than any worker can hold."""

    code = "context_length_exceeded"


class HarmfulRequest(InvalidRequest):
    """Workers were lost or hung while they computed it, one after the other."""

    code = "harmful_request"


class RequestTooCostly(InvalidRequest):
    """Reading it, or making tokens of it, took more time or memory than one request may."""

    code = "too_costly"


class InvalidKey(ApiError):
    """No API key, or none that is valid here."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class NotPermitted(ApiError):
    """A valid API key, and this is for operators alone."""

    status = 403
    kind = "invalid_request_error"
    code = "not_permitted"


class UnknownModel(ApiError):
    """Another model than the one that is served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(ApiError):
    """A request body over the limit; it was not read to its end."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class UrlTooLong(ApiError):
    """A URL over the limit; nothing of the request was looked at."""

    status = 414
    kind = "invalid_request_error"
    code = "url_too_long"


class HeadTooLarge(ApiError):
    """Headers over the limit, in bytes or in number; nothing of the request was looked at."""

    status = 431
    kind = "invalid_request_error"
    code = "headers_too_large"


class RequestTimedOut(ApiError):
    """A request that did not arrive in time; the connection is closed."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"


class ServerOverloaded(ApiError):
    """Refused so that the requests already here keep their latency."""

    status = 429
    kind = "rate_limit_error"
    code = "overloaded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class RateLimited(ApiError):
    """A tenant asks more often, or for more, than it may."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class GenerationFailed(ApiError):
    """The generation began, or was about to, and could not be finished."""

    code = "generation_failed"


class ServiceUnavailable(ApiError):
    """Nobody is there to serve this request."""

    status = 503
    kind = "server_error"
    code = "unavailable"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)
