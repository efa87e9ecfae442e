"""Write errors as HTTP responses in the client's API shape.

OpenAI's shape is ``{"error": {"message", "type", "param", "code"}}``; routes of Anthropic's API use
that API's shape. ``Retry-After`` is set where a retry may help. Internal errors are logged in full,
and the response has one sentence without details.
"""

import math
from collections.abc import Mapping

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from halfmoon_conductor.errors import (
    ApiError,
    GenerationFailed,
    InvalidKey,
    InvalidRequest,
    StreamTakenOver,
)
from halfmoon_conductor.http_server.error_bodies import (
    AnthropicError,
    AnthropicErrorBody,
    ErrorBody,
    ErrorResponse,
)
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

#: Routes at or below this path use Anthropic's error shape.
_ANTHROPIC_PATH = "/v1/messages"
#: What clients of a model call is below this path.
_API_PATH = "/v1/"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
#: The status that nginx logs for a client that disconnected; no client reads it.
CLIENT_GONE_STATUS = 499
_INTERNAL = "Something went wrong inside; the server's log has the details."
#: Longest message; the rest is cut off.
_MOST_CHARACTERS = 1000

_log = structlog.get_logger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Make an app answer with error responses whatever its routes raise."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return logged_error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(
            describe_validation_error(error.errors(), error.body), request.url.path
        )

    app.add_exception_handler(HTTPException, on_http_error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown route, a wrong method or an unreadable body; also in a mounted app."""
    assert isinstance(error, HTTPException)
    reason = f"{error.detail} ({request.method} {request.url.path})"
    if error.status_code == 404 and request.url.path.startswith(_API_PATH):
        reason += (
            f"; what is here: {', '.join(_api_paths(request.app))}, described in /openapi.json"
        )
    kind = InvalidRequest.kind if error.status_code < 500 else ApiError.kind
    body = _body(reason, kind, None, None)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        known = {*headers.get("Allow", "").split(", "), *_methods_at(request)} - {""}
        known |= {"HEAD"} if "GET" in known else set()
        headers["Allow"] = ", ".join(sorted(known))
    return _response(request.url.path, error.status_code, body, headers)


def _methods_at(request: Request) -> list[str]:
    """Return the methods of a path: each may have a route of its own (RFC 9110, section 10.2.1).

    An app that is mounted and has no such paths names none.
    """
    if not isinstance(request.app, FastAPI):
        return []
    return [
        method.upper()
        for template, methods in request.app.openapi()["paths"].items()
        if compile_path(template)[0].match(request.url.path)
        for method in methods
    ]


def _api_paths(app: FastAPI) -> list[str]:
    """Return the paths that clients of a model may call."""
    return sorted(path for path in app.openapi()["paths"] if path.startswith(_API_PATH))


def logged_error_response(error: ApiError, path: str) -> Response:
    """Return the response for an error of a route; log a failed generation."""
    if isinstance(error, GenerationFailed):
        _log.error("generation failed", reason=error.message)
    return error_response(error, path)


def error_response(error: ApiError, path: str) -> Response:
    """Return the response for an error on a route."""
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds, at least one.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, InvalidKey):
        headers["www-authenticate"] = "Bearer"
    return _response(path, error.status, openai_body(error), headers)


def internal_error(path: str) -> Response:
    """Return the response for an internal error, without details."""
    return error_response(ApiError(_INTERNAL), path)


def to_client_error(error: Exception) -> ApiError:
    """Log an error in mid-stream, and return the error to show to the client."""
    if isinstance(error, StreamTakenOver):
        _log.info("stream taken over")
        return error
    if isinstance(error, ApiError):
        _log.error("generation failed in mid-stream", reason=error.message)
        return error
    _log.error("internal error in mid-stream", exc_info=error)
    return ApiError(_INTERNAL)


def openai_body(error: ApiError) -> ErrorResponse:
    """Return an error in OpenAI's shape."""
    return _body(error.message, error.kind, error.param, error.code)


def anthropic_body(error: ApiError) -> AnthropicError:
    """Return an error in Anthropic's shape."""
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
    """Shorten a text and replace what UTF-8 can't encode: errors repeat the client's own input."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}…"
    return text.encode(errors="replace").decode()


def _response(
    path: str, status: int, body: ErrorResponse, headers: Mapping[str, str] | None
) -> Response:
    anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    content = _as_anthropic(status, body) if anthropic else body
    return JSONResponse(content.model_dump(), status_code=status, headers=dict(headers or {}))


def _as_anthropic(status: int, body: ErrorResponse) -> AnthropicError:
    kind = "api_error" if status >= 500 else _ANTHROPIC_KINDS.get(status, "invalid_request_error")
    detail = AnthropicErrorBody(type=kind, message=body.error.message)
    return AnthropicError(type="error", error=detail)
