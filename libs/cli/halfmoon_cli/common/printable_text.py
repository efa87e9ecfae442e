"""Make untrusted text printable: it must not control the user's terminal."""

import re

#: All of C0 but tab and line feed, DEL, and C1; some of them begin escape sequences.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Make control characters visible, and drop a carriage return before a line feed."""
    return _CONTROL.sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    # Unicode has pictures of C0, and none of C1.
    return chr(0x2400 + code) if code < 0x20 else "�"
