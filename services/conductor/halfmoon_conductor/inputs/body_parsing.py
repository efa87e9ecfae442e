"""Parse and validate a body; report the first error in one sentence.

Nothing here needs the model. pydantic's parser reads JSON and bounds its depth. What it refuses and
`json` might accept (half of a surrogate pair, `NaN`) is parsed again by `json`. Of a key that an
object has twice both parsers keep the last value, so bodies are checked for such keys: nearly all
have as many quotes, or keys, in their bytes as in their value. Only the others are read once more.
"""

import json
import re
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

#: Most nested lists and objects, as in pydantic's parser.
MAX_DEPTH = 200
#: The end of a string and a colon behind it.
_KEY = re.compile(rb'"\s*:')
_SHOWN_CHARACTERS = 60
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
        InvalidRequest: it is not JSON, is nested over `MAX_DEPTH` levels, or has a key twice in one
            object.
    """
    if not content:
        return None
    value = _read(content)
    n_members, n_texts = _count(value)
    # Quotes are counted in a tenth of the time; texts with quotes in them have more of them.
    if content.count(b'"') != 2 * (n_members + n_texts) and count_keys(content) != n_members:
        find_duplicate_key(content)
    return value


def count_keys(content: bytes) -> int:
    """Return how often a key may be in JSON in UTF-8: at least as often as there are keys.

    Texts that look like keys count too, so this number decides what is read once more.
    """
    return len(_KEY.findall(content))


def find_duplicate_key(content: bytes) -> None:
    """Read JSON once more, and slowly, for a key that an object has twice.

    Raises:
        InvalidRequest: there is one; the text names it.
    """
    with suppress(RecursionError):  # the first parser has bounded the depth
        # Numbers stay texts: Python converts none of over 4,300 digits.
        json.loads(content, object_pairs_hook=_refuse_duplicates, parse_int=str)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            shown = name[:_SHOWN_CHARACTERS].encode(errors="replace").decode()
            raise InvalidRequest(
                f"The key {shown!r} is twice in one object of the body, and nothing is ignored in "
                "silence: send it once.",
                param=shown,
            )
        seen.add(name)


def _count(value: Any) -> tuple[int, int]:
    """Return the members of all objects in a value, and the texts besides their keys.

    Lists that begin with a number are passed over: a prompt of token ids is one.
    """
    n_members, n_texts, rest = 0, 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            n_texts += 1
        elif isinstance(each, dict):
            n_members += len(each)
            rest += each.values()
        elif isinstance(each, list) and each and not isinstance(each[0], int | float):
            rest += each
    return n_members, n_texts


def _read(content: bytes) -> Any:
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
