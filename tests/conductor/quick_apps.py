"""Make an app for each test in a fifth of the time: what is the same in all apps is made once.

Most of the time of `create_app` goes into validators of 29 types, for 128 fields. Much of the rest
goes into the chat template, which is compiled twice.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fastapi import routing
from fastapi._compat import v2
from fastapi.utils import create_model_field
from pydantic import TypeAdapter

from halfmoon_conductor.text import named_templates
from halfmoon_conductor.text.chat_template import ChatTemplate

#: Chat templates that are kept; tests of templates make thousands.
_MAX_TEMPLATES = 64


@contextmanager
def quick_apps() -> Iterator[None]:
    """Remember validators and chat templates in this block: neither is ever changed."""
    with (
        patch.object(routing, "create_model_field", _remembered_fields()),
        patch.object(v2, "TypeAdapter", _remembered_adapters()),
        patch.object(named_templates, "ChatTemplate", _remembered_templates()),
    ):
        yield


def _remembered_fields() -> Callable[..., v2.ModelField]:
    """Return what makes the fields of responses, which differ in their names alone."""
    made: dict[object, v2.ModelField] = {}

    def field_of(name: str, type_: Any, **options: Any) -> v2.ModelField:
        if options.keys() - {"mode"}:
            return create_model_field(name, type_, **options)
        key = type_, options.get("mode")
        if key not in made:
            made[key] = create_model_field(name, type_, **options)
        field = copy.copy(made[key])
        field.name = name
        return field

    return field_of


def _remembered_adapters() -> Callable[..., TypeAdapter[Any]]:
    # The type is kept too: addresses in its text are then of no other object.
    made: dict[object, tuple[Any, TypeAdapter[Any]]] = {}

    def adapter_of(annotated: Any, *, config: Any = None) -> TypeAdapter[Any]:
        key = annotated.__origin__, repr((annotated.__metadata__, config))
        if key not in made:
            made[key] = (annotated, config), TypeAdapter(annotated, config=config)
        return made[key][1]

    return adapter_of


def _remembered_templates() -> Callable[[str, Mapping[str, str]], ChatTemplate]:
    made: dict[object, ChatTemplate] = {}

    def template_of(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        key = source, *special_tokens.items()
        if key not in made:
            if len(made) == _MAX_TEMPLATES:
                made.clear()
            made[key] = ChatTemplate(source, special_tokens)
        return made[key]

    return template_of
