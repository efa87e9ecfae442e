"""Describe what pydantic finds wrong with a request, in one sentence for the client."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon_conductor.errors import InvalidRequest, NotSupported

_SHOWN_CHARACTERS = 60


def describe_validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidRequest:
    """Describe pydantic's first finding in one sentence."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "json_invalid":
        return InvalidRequest(
            f"The body is not valid JSON: {context.get('error')}, at character {error['loc'][-1]}."
        )
    if error["loc"][:1] == ("header",):
        name = str(error["loc"][-1])
        return InvalidRequest(
            _sentence(f"The header {name}: {error['msg']}{_shown(error.get('input'))}"), param=name
        )
    param = _param(error, body)
    if kind == "contradiction":
        where, own = ("", "") if param is None else (f"{param}.", f"{param}: ")
        return InvalidRequest(_sentence(f"{own}{error['msg']}"), param=f"{where}{context['field']}")
    if param is None:
        if isinstance(body, bytes):
            return InvalidRequest(
                "The body was not read as JSON: send Content-Type: application/json with it."
            )
        if kind == "not_supported":
            return InvalidRequest(_sentence(error["msg"]), param=context.get("field"))
        return InvalidRequest("The body must be a JSON object.")
    if kind == "unknown_field":
        return InvalidRequest(
            f"{param} is not known here; leave it out (nothing is ignored in silence).",
            param=param,
        )
    if kind == "missing":
        return InvalidRequest(f"{param} is required.", param=param)
    if kind == "not_supported":
        return NotSupported(_sentence(f"{param} {error['msg']}"), param=param)
    return InvalidRequest(
        _sentence(f"{param}: {error['msg']}{_shown(error.get('input'))}"), param=param
    )


def _param(error: Mapping[str, Any], body: Any) -> str | None:
    """Return the path of the field, such as ``messages[0].content``.

    pydantic's location also contains the names of union branches. A step that is not found in the
    body is such a name, unless it is the field that is missing or unknown.
    """
    path, value = "", body
    steps = list(error["loc"][1:])
    if error["type"] == "unknown_field":
        steps.append(error["ctx"]["field"])
    for index, step in enumerate(steps):
        if isinstance(value, dict) and step in value:
            path, value = f"{path}.{step}", value[step]
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif error["type"] in ("missing", "unknown_field") and index == len(steps) - 1:
            path = f"{path}.{step}"
    return path.removeprefix(".")[: 4 * _SHOWN_CHARACTERS] or None


def _shown(value: Any) -> str:
    """Return a small offending value, by which the client recognises it."""
    if not isinstance(value, str | int | float | bool | None):
        return ""
    text = repr(value)
    return f", got {text}" if len(text) <= _SHOWN_CHARACTERS else ""


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
