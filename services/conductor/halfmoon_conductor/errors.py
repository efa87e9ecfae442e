"""Errors that a client receives instead of tokens, with their HTTP status.

ApiError
├── InvalidRequest            400  the request itself is wrong; `param` names the field
│   ├── HarmfulRequest        400  workers were lost while they computed it; it is not retried
│   ├── NotSupported          400  a known field with a value that Halfmoon does not support
│   ├── ContextLengthExceeded 400  more tokens than the model, or any worker, can hold
│   ├── PreviousResponseNotFound  400  the response to go on from is not stored
│   ├── UnusableGrammar       400  no answer can have the form that is asked for
│   └── RequestTooCostly      400  parsing or tokenizing it takes too much time or memory
├── InvalidKey                401  no API key, or an invalid one
├── NotPermitted              403  a valid key that is not an operator's
├── UnknownModel              404  another model than the one served
├── UnknownResponse           404  the response is not stored
├── UnknownWorker             404  an operator names a worker that is not there
├── RequestTimedOut           408  headers or body did not arrive in time
├── RoleChangeConflict        409  a worker can't have the requested role at present
├── StreamTakenOver           409  another connection reads the rest of this stream
├── ResumptionMismatch        409  the stream to go on with has no such event
├── BodyTooLarge              413  more bytes than the conductor accepts
├── UrlTooLong                414  a longer URL than the conductor accepts
├── HostNotAllowed            421  a name in the Host header that is not the server's
├── IdempotencyKeyReused      422  the key was sent before with another body
├── HeadTooLarge              431  larger headers than the conductor accepts
├── ServerOverloaded          429  refused so that other requests keep their latency; retry later
├── RateLimited               429  over the tenant's limits; retry later
├── GenerationFailed          500  the generation began and could not be finished
└── ServiceUnavailable        503  no worker is there to serve it; retry later

The gateway raises `ContextLengthExceeded`, `ServerOverloaded` and `ServiceUnavailable` before the
first token, and `GenerationFailed` and `InvalidRequest` at any time. `error_responses` writes these
errors as HTTP responses.
"""

from typing import ClassVar


class ApiError(Exception):
    """Base of all errors whose `message` is shown to the client."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        #: The field of the request that caused the error.
        self.param = param
        #: Seconds after which a retry may help; None when it won't.
        self.retry_after_s = retry_after_s


class InvalidRequest(ApiError):
    """An invalid request; the same request will fail again."""

    status = 400
    kind = "invalid_request_error"


class NotSupported(InvalidRequest):
    """A known field with a value that Halfmoon does not support."""

    code = "not_supported"


class ContextLengthExceeded(InvalidRequest):
    """More tokens than the model's context, or than any worker can hold."""

    code = "context_length_exceeded"


class HarmfulRequest(InvalidRequest):
    """A request that several workers were lost or hung on, one after the other."""

    code = "harmful_request"


class PreviousResponseNotFound(InvalidRequest):
    """A response to go on from that is not stored, or is another tenant's."""

    code = "previous_response_not_found"


class UnusableGrammar(InvalidRequest):
    """A grammar that does not compile, leads where no answer ends, or is too costly."""

    code = "invalid_grammar"


class RequestTooCostly(InvalidRequest):
    """A request that takes too much time or memory to parse or tokenize."""

    code = "too_costly"


class InvalidKey(ApiError):
    """A missing or invalid API key."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class NotPermitted(ApiError):
    """A valid API key on a route for operators alone."""

    status = 403
    kind = "invalid_request_error"
    code = "not_permitted"


class UnknownModel(ApiError):
    """A model that is not served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class UnknownResponse(ApiError):
    """A response that is not stored, or is another tenant's."""

    status = 404
    kind = "invalid_request_error"
    code = "response_not_found"


class UnknownItem(UnknownResponse):
    """An item of a response that is not stored, or is another tenant's."""

    code = "item_not_found"


class UnknownWorker(ApiError):
    """A worker that is not in the cluster."""

    status = 404
    kind = "invalid_request_error"
    code = "worker_not_found"


class RoleChangeConflict(ApiError):
    """A role that a worker can't have at present, or has been given already."""

    status = 409
    kind = "invalid_request_error"
    code = "role_conflict"


class StreamTakenOver(ApiError):
    """A stream that another connection with the same key reads now."""

    status = 409
    kind = "invalid_request_error"
    code = "stream_taken_over"


class ResumptionMismatch(ApiError):
    """An answer that does not have the event after which a client wants to go on."""

    status = 409
    kind = "invalid_request_error"
    code = "resumption_mismatch"


class IdempotencyKeyReused(ApiError):
    """A key that was sent before with another body."""

    status = 422
    kind = "invalid_request_error"
    code = "idempotency_key_reused"


class BodyTooLarge(ApiError):
    """A request body over the limit; the rest of it was not read."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class UrlTooLong(ApiError):
    """A URL over the limit; the rest of the request was not read."""

    status = 414
    kind = "invalid_request_error"
    code = "url_too_long"


class HostNotAllowed(ApiError):
    """A name in the Host header that is not the server's: another site's page may be asking."""

    status = 421
    kind = "invalid_request_error"
    code = "host_not_allowed"


class HeadTooLarge(ApiError):
    """Headers over the limit, in bytes or in number; the rest of the request was not read."""

    status = 431
    kind = "invalid_request_error"
    code = "headers_too_large"


class RequestTimedOut(ApiError):
    """A request that did not arrive in time; the connection is closed."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"


class ServerOverloaded(ApiError):
    """A refusal that keeps the latency of the requests already here."""

    status = 429
    kind = "rate_limit_error"
    code = "overloaded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class RateLimited(ApiError):
    """A request over its tenant's rate or concurrency limit."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class GenerationFailed(ApiError):
    """A generation that began, or was about to, and could not be finished."""

    code = "generation_failed"


class ServiceUnavailable(ApiError):
    """A request that no worker is there to serve."""

    status = 503
    kind = "server_error"
    code = "unavailable"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)
