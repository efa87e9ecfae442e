"""Errors on the wire: whatever goes wrong, a client reads its API's error shape.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``; clients of Anthropic's API get
that one's. The status belongs to the error, and ``Retry-After`` is there where trying again may
help. What is our own mistake is logged whole and told in one sentence without details.
"""

import math
from collections.abc import Mapping

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from halfmoon_conductor.errors import (
    ApiError,
    GenerationFailed,
    InvalidKey,
    InvalidRequest,
)
from halfmoon_conductor.http_server.error_bodies import (
    AnthropicError,
    AnthropicErrorBody,
    ErrorBody,
    ErrorResponse,
)
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

#: Below this path errors have Anthropic's shape.
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
#: What nginx logs for a client that hung up; nobody is there to read it.
CLIENT_GONE_STATUS = 499
_INTERNAL = "Something went wrong inside; the server's log has the details."
#: Of a message, whatever is in it.
_MOST_CHARACTERS = 1000

_log = structlog.get_logger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Answer in this shape whatever the app's routes raise."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        if isinstance(error, GenerationFailed):
            _log.error("generation failed", reason=error.message)
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(
            describe_validation_error(error.errors(), error.body), request.url.path
        )

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        """No such route, no such method, or a body that could not be read."""
        reason = f"{error.detail} ({request.method} {request.url.path})"
        kind = InvalidRequest.kind if error.status_code < 500 else ApiError.kind
        body = _body(reason, kind, None, None)
        return _response(request.url.path, error.status_code, body, error.headers)


def error_response(error: ApiError, path: str) -> Response:
    """The response that tells of this error to whoever asked at this path."""
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds, and never "at once".
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, InvalidKey):
        headers["www-authenticate"] = "Bearer"
    return _response(path, error.status, openai_body(error), headers)


def internal_error(path: str) -> Response:
    """For a mistake of ours: nothing of our inside is told."""
    return error_response(ApiError(_INTERNAL), path)


def to_client_error(error: Exception) -> ApiError:
    """What a client is told of an error in mid-stream, and the log of it."""
    if isinstance(error, ApiError):
        _log.error("generation failed in mid-stream", reason=error.message)
        return error
    _log.error("internal error in mid-stream", exc_info=error)
    return ApiError(_INTERNAL)


def openai_body(error: ApiError) -> ErrorResponse:
    """OpenAI's shape of an error."""
    return _body(error.message, error.kind, error.param, error.code)


def anthropic_body(error: ApiError) -> AnthropicError:
    """Anthropic's shape of an error."""
    return _as_anthropic(error.status, openai_body(error))


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorResponse:
    return ErrorResponse(
        error=ErrorBody(
            message=_encodable(message),
            type=kind,
            param=None if param is None else _encodable(param),
            code=code,
        )
    )


def _encodable(text: str) -> str:
    """Clients' own words come back in errors, and may be long, or hold what can't be encoded."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}…"
    return text.encode(errors="replace").decode()


def _response(
    path: str, status: int, body: ErrorResponse, headers: Mapping[str, str] | None
) -> Response:
    anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    told = _as_anthropic(status, body) if anthropic else body
    return JSONResponse(told.model_dump(), status_code=status, headers=dict(headers or {}))


def _as_anthropic(status: int, body: ErrorResponse) -> AnthropicError:
    kind = "api_error" if status >= 500 else _ANTHROPIC_KINDS.get(status, "invalid_request_error")
    detail = AnthropicErrorBody(type=kind, message=body.error.message)
    return AnthropicError(type="error", error=detail)
