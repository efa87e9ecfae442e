"""Define the names, filters and tags that chat templates may use: those that transformers gives.

Templates are foreign programs, so they run in Jinja's sandbox.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def template_environment() -> jinja2.Environment:
    """Return an environment in which a chat template renders as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationBlock(Extension):
    """Parse ``{% generation %}…{% endgeneration %}``, which marks text for training only.

    Names that are set within it are unknown behind it, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @pass_eval_context
    def _text(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as in the models' training: no HTML escapes, non-ASCII characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _TemplateDict:
    """Make dictionaries without giving a template the class itself."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """Hold what a template sets, except under names that begin with an underscore."""

    def __init__(*args: Any, **items: Any) -> None:
        # Without a named `self`, so that a template may set that name.
        self, *given = args
        attributes = dict(*given, **items)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace can't have {name!r}: names that begin with an underscore are not allowed"
        )
