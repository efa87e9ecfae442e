"""Make the errors of fields that are each valid, and contradict each other."""

from typing import Any

from pydantic_core import PydanticCustomError


def contradiction(field: str, message: str, **context: Any) -> PydanticCustomError:
    """Return the error of a field that does not go with others; the message names all of them.

    Args:
        field: the one to change, for programs.
        message: for people, with `context` in braces.
        **context: values that the message shows.
    """
    return PydanticCustomError("contradiction", message, {"field": field, **context})
