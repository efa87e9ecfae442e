"""What stands between the markers of a call, whole or cut off, read as a call."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic_core

_KEYS = ("arguments", "parameters")
#: How a call is written up to its arguments, with the blanks that JSON allows.
_BLANKS = r"[ \t\r\n]*"
_HEADER = re.compile(
    _BLANKS.join(
        ("", r"\{", '"name"', ":", r'"(?P<name>[^"\\]*)"', ",", f'"(?:{"|".join(_KEYS)})"', ":", "")
    )
)
_NAME_FIRST = re.compile(rf'{_BLANKS}\{{{_BLANKS}"name"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ParsedCall(msgspec.Struct, frozen=True):
    """One call; its arguments are a JSON object's text."""

    name: str
    arguments: str
    #: False: the answer was cut off within the arguments, which are the text as far as it came.
    whole: bool = True


def parse_complete_members(arguments: str) -> dict[str, Any]:
    """Arguments as an object; of a text that is cut off, the members that are complete."""
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
    """The call that a body is, if it is one."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ParsedCall(_unicode(name), _text_of(arguments)) if isinstance(arguments, dict) else None


def read_cut_call(body: str, names: Sequence[str]) -> ParsedCall | None:
    """The call that a body, cut off anywhere, begins with, if its name can be told.

    Args:
        body: what came of it.
        names: the functions on offer; a name that is cut off is completed if one alone fits.
    """
    if header := _HEADER.match(body):
        arguments = body[header.end() :]
        return _cut_arguments(header["name"], arguments) if arguments[:1] in ("", "{") else None
    fitting = _fitting(body, names)
    return ParsedCall(fitting[0], "", whole=False) if len(fitting) == 1 else None


def may_begin_call(body: str, names: Sequence[str]) -> bool:
    """Whether a body, cut off anywhere, may become a call of one of these."""
    return bool(_fitting(body, names)) or read_cut_call(body, names) is not None


def begins_with_name(body: str) -> bool:
    """Whether a body begins as grammars write calls: with the name."""
    return _NAME_FIRST.match(body) is not None


def ends_in_string(body: str) -> bool:
    """Whether the end of a JSON text lies within one of its strings."""
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
    """The text without halves of surrogate pairs, which JSON can spell and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _fitting(body: str, names: Sequence[str]) -> list[str]:
    """The names that a header, cut off before its end, may still have."""
    begun = "".join(body.split())
    return [
        name
        for name in names
        if any(f'{{"name":"{name}","{key}":'.startswith(begun) for key in _KEYS)
    ]
