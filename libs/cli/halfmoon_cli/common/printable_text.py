"""A model's words on somebody's terminal: nothing in them may command it."""

import re

#: All of C0 but tab and line feed, DEL, and C1: among them what begins an escape sequence.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with control characters made visible; a carriage return before a line feed goes."""
    return _CONTROL.sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    # The pictures that Unicode has for C0; C1 has none.
    return chr(0x2400 + code) if code < 0x20 else "�"
