"""Read single headers of a request, at less cost than the framework's mapping of all of them."""

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str:
    """Return the first header of this name, which is in lower case; empty if there is none."""
    for each, value in scope["headers"]:
        if each == name:
            return str(value, "latin-1")
    return ""
