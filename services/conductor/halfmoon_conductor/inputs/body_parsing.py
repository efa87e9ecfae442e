"""Parse and validate a body; report the first error in one sentence.

Nothing here needs the model. pydantic's parser reads JSON and bounds its depth. What it refuses and
`json` might accept (half of a surrogate pair, `NaN`) is parsed again by `json`.
"""

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

#: Most nested lists and objects, as in pydantic's parser.
MAX_DEPTH = 200
_NOT_JSON = "The body was not read as JSON: send Content-Type: application/json with it."


def check_headers(headers: Headers) -> None:
    """Check that the headers declare plain JSON.

    Raises:
        InvalidRequest: they declare another type, or compression.
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
    """Parse JSON; return None for an empty body.

    Raises:
        InvalidRequest: it is not JSON, or nested over `MAX_DEPTH` levels.
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


def validate_body(model: TypeAdapter[Any], value: Any) -> Any:
    """Validate a parsed body against a model.

    Raises:
        InvalidRequest: it does not fit; the text describes the first error.
    """
    try:
        return model.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        described = {**first, "loc": ("body", *first["loc"])}
    raise describe_validation_error([described], value)
