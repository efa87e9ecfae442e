"""From the bytes of a body to checked fields, or to one short error; nothing here needs the model.

JSON is read by pydantic's parser, which bounds its depth. What it refuses, and `json` might take
(half of a surrogate pair, `NaN`), is read again by that one.
"""

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

#: Lists and objects in one another, at the most: pydantic's parser has this limit.
MAX_DEPTH = 200
_NOT_JSON = "The body was not read as JSON: send Content-Type: application/json with it."


def check_headers(headers: Headers) -> None:
    """Check that a body is said to be plain JSON.

    Raises:
        InvalidRequest: it is said to be something else, or to be compressed.
    """
    kind = headers.get("content-type", "")
    if kind != "application/json":
        kind = kind.partition(";")[0].strip().lower()
        is_json = kind.startswith("application/") and kind.endswith("+json")
        if kind != "application/json" and not is_json:
            raise InvalidRequest(_NOT_JSON)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("Content-Encoding is not supported: send the body as it is.")


def parse_json(content: bytes) -> Any:
    """Parse JSON; None for no bytes at all.

    Raises:
        InvalidRequest: it is no JSON, or nested over `MAX_DEPTH` levels.
    """
    if not content:
        return None
    try:
        return from_json(content)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise InvalidRequest(
                f"The body is nested over {MAX_DEPTH} levels deep, the most that is accepted."
            ) from None
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error.msg}, at character {error.pos}."
        ) from None
    except (ValueError, RecursionError):
        raise InvalidRequest("There was an error parsing the body as JSON.") from None


def validate_body(shape: TypeAdapter[Any], value: Any) -> Any:
    """Check a parsed body against a shape.

    Raises:
        InvalidRequest: it does not fit; the text is of the first thing that is wrong.
    """
    try:
        return shape.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        described = {**first, "loc": ("body", *first["loc"])}
    raise describe_validation_error([described], value)
