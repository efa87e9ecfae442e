"""Describe the routes' responses for ``/openapi.json``."""

from typing import Any

from pydantic import BaseModel

from halfmoon_conductor.http_server.error_bodies import ErrorResponse

#: By status, as FastAPI's routes take them.
OpenApiResponses = dict[int | str, dict[str, Any]]

_ERROR_DESCRIPTIONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or none that is valid here.",
    404: "Another model is served here.",
    413: "The body is too large.",
    429: "Refused so that others keep their latency, or because this tenant asks more than it "
    "may; `Retry-After` says when to try again.",
    500: "The generation, or the server, failed.",
    503: "No prefill or no decode worker is alive; `Retry-After` says when to try again.",
}


def error_responses_of(*statuses: int) -> OpenApiResponses:
    """Return the error responses with these statuses, in OpenAI's shape."""
    responses: OpenApiResponses = {
        status: {"model": ErrorResponse, "description": _ERROR_DESCRIPTIONS[status]}
        for status in statuses
    }
    responses["4XX"] = {"model": ErrorResponse, "description": "Any other error of the client's."}
    return responses


def with_error(model: type[BaseModel], responses: OpenApiResponses) -> OpenApiResponses:
    """Return responses with another model for errors."""
    return {
        status: {**each, "model": model} if "model" in each else each
        for status, each in responses.items()
    }


#: Responses of a route that generates.
GENERATION_RESPONSES: OpenApiResponses = {
    **error_responses_of(*_ERROR_DESCRIPTIONS),
    200: {
        "description": "The answer; server-sent events with `stream: true`.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"object": "…", "choices": […]}\n\ndata: [DONE]\n\n',
            }
        },
    },
}
