"""What ``/openapi.json`` says of API keys, where they are asked for."""

from typing import Any

from fastapi import FastAPI

from halfmoon_conductor.http_server.auth_middleware import is_guarded

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document_api_keys(app: FastAPI) -> None:
    """Have the schema say of each route that the door guards: a key, in either header.

    Args:
        app: with all of its routes, or they are added before the schema is first asked for.
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

    # FastAPI looks the method up on its app, and is meant to be told so.
    app.openapi = document  # type: ignore[method-assign]
