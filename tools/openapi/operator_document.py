"""Make the OpenAPI documents of workers' HTTP for operators, from the routes that they add."""

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from halfmoon_kvstore.admin_api import AdminApi
from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_runtime.observability.operator_http import OperatorHttp, OperatorRoute
from halfmoon_runtime.observability.route_doc import RouteDoc
from tools.openapi.document_parts import (
    ERROR_SCHEMA,
    LICENSE,
    OPERATOR_TOKEN,
    VERSION,
    described_schemas,
    error_response,
    json_content,
)

Document = dict[str, Any]

_WORKER = """\
What every worker (prefill, decode, kvstore) serves to operators and to Prometheus, at `http` of \
its record. A worker has it unless `--metrics-port` is -1."""
_KVSTORE = """\
What a kvstore serves to operators, beside the routes of every worker. With a cluster key, its own \
routes need `Authorization: Bearer`: the HMAC-SHA-256 of `halfmoon operator 1` under the key."""
_REFUSED = {
    400: "A parameter or field is wrong; `param` names it.",
    401: "The cluster has a key, and no token of it was shown.",
    503: "The event loop did not answer in ten seconds.",
}
_BODY_REFUSED = {
    411: "The body has no Content-Length.",
    413: "The body is over 64 KiB.",
    415: "The body is not application/json.",
}


def worker_document() -> Document:
    """Return the document of what every worker serves."""
    return _document("Halfmoon worker, for operators", _WORKER, [])


def kvstore_document() -> Document:
    """Return the document of what a kvstore serves."""
    return _document("Halfmoon kvstore, for operators", _KVSTORE, kvstore_http().routes)


def kvstore_http() -> OperatorHttp:
    """Return a server with all routes of a kvstore, of which none can be asked."""
    unused: Any = None
    http = OperatorHttp(unused, unused)
    AdminApi(unused, unused).register(http)
    DrainController(unused, unused, unused, unused).register(http)
    return http


def _document(title: str, about: str, routes: Sequence[OperatorRoute]) -> Document:
    kinds = [kind for route in routes if route.doc for kind in _kinds(route.doc)]
    schemas, components = described_schemas(kinds)
    schema_of = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: Document = dict(_OPEN)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    document = {
        "openapi": "3.1.0",
        "info": {"title": title, "description": about, "version": VERSION, "license": LICENSE},
        "servers": [
            {
                "url": "{http}",
                "description": "`http` of the worker's record.",
                "variables": {"http": {"default": "http://127.0.0.1:9100"}},
            }
        ],
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR_SCHEMA}},
    }
    if routes:
        document["components"]["securitySchemes"] = OPERATOR_TOKEN  # type: ignore[index]
    return document


def _kinds(doc: RouteDoc) -> Iterator[Any]:
    yield from doc.parts.values()
    yield from doc.query.values()
    yield doc.answer
    if doc.body is not None:
        yield doc.body


def _operation(route: OperatorRoute, schema_of: dict[int, Document]) -> Document:
    doc = route.doc or RouteDoc()
    errors = _REFUSED | (_BODY_REFUSED if doc.body is not None else {}) | dict(doc.errors)
    operation: Document = {
        "operationId": getattr(route.handler, "__name__", route.path),
        "summary": str(route.handler.__doc__).split("\n")[0].rstrip("."),
        "security": [{}, {"operatorToken": []}],
        "parameters": [
            {"name": name, "in": place, "required": required, "schema": schema_of[id(kind)]}
            for place, required, kinds in (("path", True, doc.parts), ("query", False, doc.query))
            for name, kind in kinds.items()
        ],
        "responses": {
            "200": {"description": "Done.", "content": json_content(schema_of[id(doc.answer)])},
            **{str(status): error_response(text, status) for status, text in errors.items()},
        },
    }
    if doc.body is not None:
        operation["requestBody"] = {
            "required": doc.body_is_required,
            "content": json_content(schema_of[id(doc.body)]),
        }
    return operation


def _status(name: str, text: str) -> Document:
    schema = {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"const": text, "description": "Always the same."}},
    }
    return {
        "operationId": name,
        "summary": "Tell whether the process is alive"
        if name == "health"
        else "Tell whether the worker takes work",
        "responses": {
            "200": {"description": "It is so.", "content": json_content(schema)},
            "503": error_response(
                "The event loop did not answer in ten seconds"
                + ("." if name == "health" else ", or the worker is starting or stopping."),
                HTTPStatus.SERVICE_UNAVAILABLE,
            ),
        },
    }


#: What needs no token.
_OPEN: Document = {
    "/health": {"get": _status("health", "ok")},
    "/ready": {"get": _status("ready", "ready")},
    "/metrics": {
        "get": {
            "operationId": "metrics",
            "summary": "Return metrics, in a format of Prometheus that Accept names",
            "parameters": [
                {
                    "name": "name[]",
                    "in": "query",
                    "required": False,
                    "description": "Return these metrics alone.",
                    "schema": {"type": "array", "items": {"type": "string"}},
                }
            ],
            "responses": {
                "200": {
                    "description": "All metrics of the process.",
                    "content": {
                        "text/plain": {"schema": {"type": "string"}},
                        "application/openmetrics-text": {"schema": {"type": "string"}},
                    },
                }
            },
        }
    },
}
