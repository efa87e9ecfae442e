"""Parse the JSON of a tool call, whole or cut off."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic_core

_KEYS = ("arguments", "parameters")
#: The text of a call up to its arguments, with the whitespace that JSON allows.
_BLANKS = r"[ \t\r\n]*"
_HEADER = re.compile(
    _BLANKS.join(
        ("", r"\{", '"name"', ":", r'"(?P<name>[^"\\]*)"', ",", f'"(?:{"|".join(_KEYS)})"', ":", "")
    )
)
_NAME_FIRST = re.compile(rf'{_BLANKS}\{{{_BLANKS}"name"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ParsedCall(msgspec.Struct, frozen=True):
    """One tool call; its arguments are the text of a JSON object."""

    name: str
    arguments: str
    #: False: the answer was cut off within the arguments, which end where the answer ended.
    whole: bool = True


def parse_complete_members(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; of a text that is cut off, only complete members."""
    try:
        whole = json.loads(arguments)
    except (ValueError, RecursionError):
        return _complete_members(arguments)
    return dict(json.loads(_text_of(whole))) if isinstance(whole, dict) else {}


def _complete_members(text: str) -> dict[str, Any]:
    try:
        read = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def read_call(body: str) -> ParsedCall | None:
    """Return the call in a complete body; None if it is not one."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ParsedCall(_unicode(name), _text_of(arguments)) if isinstance(arguments, dict) else None


def read_cut_call(body: str, names: Sequence[str]) -> ParsedCall | None:
    """Return the call that a cut-off body begins with; None if its name is not certain.

    Args:
        body: the text so far.
        names: the functions on offer; a cut-off name is completed if only one fits.
    """
    if header := _HEADER.match(body):
        arguments = body[header.end() :]
        return _cut_arguments(header["name"], arguments) if arguments[:1] in ("", "{") else None
    names_left = _matching_names(body, names)
    return ParsedCall(names_left[0], "", whole=False) if len(names_left) == 1 else None


def may_begin_call(body: str, names: Sequence[str]) -> bool:
    """Return whether a cut-off body may become a call of one of these functions."""
    return bool(_matching_names(body, names)) or read_cut_call(body, names) is not None


def begins_with_name(body: str) -> bool:
    """Return whether a body begins with the name, as grammars write calls."""
    return _NAME_FIRST.match(body) is not None


def ends_in_string(body: str) -> bool:
    """Return whether a JSON text ends within a string."""
    return '"' in _STRING.sub("", body)


def _cut_arguments(name: str, text: str) -> ParsedCall:
    try:
        arguments, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ParsedCall(name, text, whole=False)
    return ParsedCall(name, _text_of(arguments))


def _text_of(arguments: dict[str, Any]) -> str:
    return _unicode(json.dumps(arguments, ensure_ascii=False))


def _unicode(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can write and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _matching_names(body: str, names: Sequence[str]) -> list[str]:
    """Return the names that still fit a header that was cut off."""
    written = "".join(body.split())
    return [
        name
        for name in names
        if any(f'{{"name":"{name}","{key}":'.startswith(written) for key in _KEYS)
    ]
