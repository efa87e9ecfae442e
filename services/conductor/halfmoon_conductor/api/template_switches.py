"""Check how a conversation is to end: with a new turn, or within its last message.

Clients say it by fields, or by the same names in ``chat_template_kwargs``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.field_errors import contradiction

_BEGIN, _CONTINUE = "add_generation_prompt", "continue_final_message"
_SWITCHES = (_BEGIN, _CONTINUE)
#: Arguments of a template that are fields of a request, and one that no request has.
_FIELDS = ("messages", "tools", "documents")
_REFUSED = ("chat_template", "conversation", "tokenize")


def check_template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse names in ``chat_template_kwargs`` that have another place.

    Raises:
        PydanticCustomError: naming the name and the place.
    """
    for name, value in variables.items():
        if name in _FIELDS:
            raise PydanticCustomError(
                "not_supported",
                "can't set {name}, which the template gets from the request's "
                "own field; send it there",
                {"name": name},
            )
        if name in _REFUSED:
            raise PydanticCustomError(
                "not_supported",
                "can't set {name}, which is not for clients to choose; leave it out",
                {"name": name},
            )
        if name in _SWITCHES and value is not None and not isinstance(value, bool):
            raise PydanticCustomError(
                "wrong_type", "has {name}, which must be true or false", {"name": name}
            )
    return variables


def begins_turn(body: Any) -> bool:
    """Return whether the text ends with the start of an assistant's turn."""
    given = _switch(body, _BEGIN)
    return not continues_turn(body) if given is None else given


def continues_turn(body: Any) -> bool:
    """Return whether the text ends with that of the last message."""
    return bool(_switch(body, _CONTINUE))


def check_ending(body: Any) -> None:
    """Check that a request says in one way how its text ends.

    Raises:
        PydanticCustomError: it contradicts itself.
    """
    for name in _SWITCHES:
        check_same(name, getattr(body, name), body.chat_template_kwargs)
    if _switch(body, _BEGIN) and continues_turn(body):
        raise contradiction(
            _CONTINUE,
            "add_generation_prompt begins a new turn, and continue_final_message goes on with the "
            "last one; send one of them",
        )


def check_same(name: str, field: Any, variables: Mapping[str, Any] | None) -> None:
    """Check that a field and the same name in ``chat_template_kwargs`` do not differ.

    Raises:
        PydanticCustomError: they do.
    """
    given = (variables or {}).get(name)
    if None not in (given, field) and given != field:
        raise contradiction(
            name, "{name} and that of chat_template_kwargs differ; send one of them", name=name
        )


def _switch(body: Any, name: str) -> bool | None:
    field = getattr(body, name)
    given = (body.chat_template_kwargs or {}).get(name)
    return given if field is None else field
