"""Document API keys in ``/openapi.json`` where they are required."""

from typing import Any

from fastapi import FastAPI

from halfmoon_conductor.http_server.auth_middleware import is_guarded

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document_api_keys(app: FastAPI) -> None:
    """Declare in the schema that guarded routes need a key, in either header.

    Args:
        app: all of its routes must be added before the schema is first requested.
    """
    document_of = app.openapi

    def document() -> dict[str, Any]:
        made = document_of()
        made["components"]["securitySchemes"] = _SCHEMES
        for path, operations in made["paths"].items():
            if is_guarded(path):
                for operation in operations.values():
                    operation["security"] = [{name: []} for name in _SCHEMES]
        return made

    # FastAPI calls this method of its app, and documents replacing it.
    app.openapi = document  # type: ignore[method-assign]
