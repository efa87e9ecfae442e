"""Make the parts that several OpenAPI documents share."""

from collections.abc import Iterable
from typing import Any

import msgspec

from halfmoon_protocol.schema.message_schema import describe_fields, described_types

Document = dict[str, Any]

VERSION = "0.1.0"
LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which a retry may help.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_AUTHENTICATE = {
    "WWW-Authenticate": {
        "required": True,
        "description": "Names the scheme.",
        "schema": {"const": "Bearer"},
    }
}

OPERATOR_TOKEN = {
    "operatorToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "HMAC-SHA-256 of `halfmoon operator 1` under the cluster key, in "
        "hexadecimal. Needed if the cluster has a key.",
    }
}
#: What `OperatorHttp` and the conductor answer errors with.
ERROR_SCHEMA = {
    "type": "object",
    "description": "What is wrong, in the shape of the REST API's errors.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "description": "The error.",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, in a sentence."},
                "type": {
                    "enum": ["invalid_request_error", "server_error"],
                    "description": "Whose fault it is.",
                },
                "param": {
                    "type": ["string", "null"],
                    "description": "Parameter or field at fault.",
                },
                "code": {
                    "type": ["string", "null"],
                    "description": "What programs may tell errors apart by.",
                },
            },
        }
    },
}


def described_schemas(kinds: Iterable[Any]) -> tuple[list[Document], Document]:
    """Return the schemas of types, and of what they are made of, with the comments of fields."""
    kinds = list(kinds)
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for kind in kinds:
        for described in described_types(kind):
            describe_fields(described, components[described.cls.__name__])
    return list(schemas), components


def json_content(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON body."""
    return {"application/json": {"schema": schema}}


def error_response(description: str, status: int) -> dict[str, Any]:
    """Return a response with an error in JSON."""
    headers = {401: _AUTHENTICATE, 429: _RETRY_AFTER, 503: _RETRY_AFTER}.get(status, {})
    return {
        "description": description,
        **({"headers": headers} if headers else {}),
        "content": json_content({"$ref": "#/components/schemas/Error"}),
    }
