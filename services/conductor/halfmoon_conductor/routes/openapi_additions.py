"""Complete ``/openapi.json``: headers of all responses, and the events of streams."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from halfmoon_conductor.api.openai.openai_objects import ChatChunk, CompletionChunk

_REFERENCE = "#/components/schemas/{model}"
#: What the events of a stream are, where they are of one kind.
_EVENTS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionChunk,
    "/v1/chat/completions": ChatChunk,
}
_REQUEST_ID = {
    "description": "The request's name in logs: the client's own, or a new one.",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {
    "description": "Seconds after which a retry may help.",
    "schema": {"type": "integer", "minimum": 1},
}
_AUTHENTICATE = {"description": "Names the scheme.", "schema": {"const": "Bearer"}}


def complete_openapi(app: FastAPI) -> None:
    """Add to the schema of an app what FastAPI can't see, as middleware and streams do it.

    Args:
        app: all of its routes must be added before the schema is first requested.
    """
    document_of = app.openapi
    done: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        made = document_of()
        if not done:
            _add_headers(made)
            _add_events(made)
            done.append(made)
        return made

    # FastAPI calls this method of its app, and documents replacing it.
    app.openapi = document  # type: ignore[method-assign]


def _add_headers(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                headers = response.setdefault("headers", {})
                headers["X-Request-Id"] = _REQUEST_ID
                if status in ("429", "503"):
                    headers["Retry-After"] = _RETRY_AFTER
                if status == "401":
                    headers["WWW-Authenticate"] = _AUTHENTICATE


def _add_events(document: dict[str, Any]) -> None:
    """Name the type of each event: OpenAPI 3.1 has no word for it, 3.2 has `itemSchema`."""
    _, found = models_json_schema(
        [(model, "serialization") for model in _EVENTS.values()], ref_template=_REFERENCE
    )
    for name, schema in found["$defs"].items():
        document["components"]["schemas"].setdefault(name, schema)
    for path, model in _EVENTS.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        reference = {"$ref": _REFERENCE.format(model=model.__name__)}
        content["text/event-stream"]["x-event-schema"] = reference
