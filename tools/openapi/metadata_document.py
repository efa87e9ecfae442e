"""Make the OpenAPI document of the metadata server."""

from typing import Any

from halfmoon_metadata.store_interface import (
    MAX_COUNT,
    MAX_KEY_CHARS,
    MAX_LISTED_BYTES,
    MAX_LISTED_RECORDS,
    MAX_TTL_S,
    MAX_VALUE_BYTES,
)
from tools.openapi.document_parts import LICENSE, VERSION, json_content

Document = dict[str, Any]

_ABOUT = f"""\
Records of members and segments: the protocol of Mooncake's engine, with conditions, leases, \
listings and counters. In a cluster with a key each request shows a token. A value has at most \
{MAX_VALUE_BYTES} bytes, a listing {MAX_LISTED_RECORDS} records and {MAX_LISTED_BYTES} bytes."""
_ETAG_PATTERN = '^"[0-9a-f]{64}"$'
#: Another one is an ETag too, and no record has it.
_ANY_ETAG_PATTERN = '^"[!#-~]+"$'
_KEY = {
    "name": "key",
    "in": "query",
    "description": "The key of the record.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
}
_REQUIRED_KEY = {**_KEY, "required": True}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "Do it only if the record has the value of this ETag. Not with If-None-Match.",
    "schema": {"type": "string", "pattern": _ANY_ETAG_PATTERN},
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "Do it only if there is no record. Not with If-Match.",
    "schema": {"const": "*"},
}
_ETAG = {
    "ETag": {
        "required": True,
        "description": "SHA-256 of the value, in quotes.",
        "schema": {"type": "string", "pattern": _ETAG_PATTERN},
    }
}
_OK = {"text/plain": {"schema": {"const": "ok"}}}


def _refused(description: str, **headers: Any) -> Document:
    return {
        "description": description,
        **({"headers": headers} if headers else {}),
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }


_REFUSED = {
    "400": _refused("A parameter or header is wrong; the text names it."),
    "401": _refused(
        "The cluster has a key, and no token of it was shown.",
        **{
            "WWW-Authenticate": {
                "required": True,
                "description": "Names the scheme.",
                "schema": {"const": "Bearer"},
            }
        },
    ),
    "503": _refused("The store behind the server does not answer."),
}
_NO_RECORD = {"404": _refused("There is no such record.")}
_UNMET = {"412": _refused("The condition does not hold, and nothing was changed.")}


def metadata_document() -> Document:
    """Return the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halfmoon metadata server",
            "description": _ABOUT,
            "version": VERSION,
            "license": LICENSE,
        },
        "servers": [
            {
                "url": "{server}",
                "description": "The URL in `--metadata`, without `/metadata` at its end.",
                "variables": {"server": {"default": "http://127.0.0.1:7999"}},
            }
        ],
        "security": [{}, {"metadataToken": []}],
        "paths": {
            "/metadata": {"get": _GET, "put": _PUT, "delete": _DELETE},
            "/metadata/increment": {"post": _INCREMENT},
        },
        "components": {
            "securitySchemes": {
                "metadataToken": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "HMAC-SHA-256 of `halfmoon metadata 1` under the cluster key, "
                    "in hexadecimal. Needed if the cluster has a key.",
                }
            }
        },
    }


_GET: Document = {
    "operationId": "getRecord",
    "summary": "Return the value of a key, or all records whose keys begin with a prefix",
    "description": "Give one of the two parameters.",
    "parameters": [
        {**_KEY, "required": False},
        {
            "name": "prefix",
            "in": "query",
            "required": False,
            "description": "What the keys begin with; ignored beside a key.",
            "schema": {"type": "string", "maxLength": MAX_KEY_CHARS},
        },
    ],
    "responses": {
        "200": {
            "description": "The value, with its ETag; or the records, in JSON.",
            "headers": {"ETag": {**_ETAG["ETag"], "required": False}},
            "content": {
                "application/octet-stream": {"schema": {}},
                **json_content(
                    {
                        "type": "object",
                        "description": "Values by key.",
                        "additionalProperties": {"type": "string", "contentEncoding": "base64"},
                    }
                ),
            },
        },
        **_NO_RECORD,
        **_REFUSED,
    },
}
_PUT: Document = {
    "operationId": "putRecord",
    "summary": "Set the value of a key, perhaps with a lease or under a condition",
    "parameters": [
        _REQUIRED_KEY,
        {
            "name": "ttl_s",
            "in": "query",
            "required": False,
            "description": "Seconds after which the record goes, unless it is put again.",
            "schema": {"type": "number", "minimum": 0.001, "maximum": MAX_TTL_S, "x-unit": "s"},
        },
        _IF_MATCH,
        _IF_NONE_MATCH,
    ],
    "requestBody": {
        "required": False,
        "description": "The value; nothing is a value too.",
        "content": {"application/octet-stream": {"schema": {}}},
    },
    "responses": {
        "200": {"description": "It is set.", "headers": _ETAG, "content": _OK},
        **_UNMET,
        "413": _refused("The value is too large."),
        **_REFUSED,
    },
}
_DELETE: Document = {
    "operationId": "deleteRecord",
    "summary": "Delete a record, perhaps under a condition",
    "description": "With If-None-Match it only checks that there is none.",
    "parameters": [_REQUIRED_KEY, _IF_MATCH, _IF_NONE_MATCH],
    "responses": {
        "200": {"description": "It is deleted.", "content": _OK},
        **_NO_RECORD,
        **_UNMET,
        **_REFUSED,
    },
}
_INCREMENT: Document = {
    "operationId": "incrementCounter",
    "summary": "Count a counter up, and return the count",
    "parameters": [_REQUIRED_KEY],
    "responses": {
        "200": {
            "description": "The count.",
            "content": json_content({"type": "integer", "minimum": 1, "maximum": MAX_COUNT}),
        },
        **_REFUSED,
    },
}
