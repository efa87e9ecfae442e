"""Render a conversation into the text that the model was trained to continue.

Chat templates are Jinja programs that come with the model. They run in a sandbox, with the names
that transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable

TemplateMessage = Mapping[str, Any]


class ChatTemplate:
    """The compiled chat template of one model.

    Args:
        source: Jinja source.
        special_tokens: texts by name, such as ``bos_token``, for the template to write.

    Raises:
        TokenizerUnavailable: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
            #: Names that the template reads.
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerUnavailable(
                f"the chat template is not valid Jinja: {error.message}, line {error.lineno}"
            ) from None

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation, with BOS where the template writes one.

        Args:
            messages: each with a role and a content, which is a string.
            add_generation_prompt: end with the start of an assistant's turn.
            variables: more names for the template (``enable_thinking`` and such).
            tools: the tools that the model may call, as OpenAI writes them.

        Raises:
            InvalidRequest: the template refuses the conversation; the text is the template's.
        """
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    # Templates test whether these are none; an undefined name is not.
                    "tools": list(tools) or None,
                    "documents": None,
                }
            )
        except Exception as error:  # the template is a foreign program: any error is a refusal
            raise InvalidRequest(
                f"this model's chat template refuses these messages: {error}", param="messages"
            ) from None

    def with_effort(
        self, variables: Mapping[str, Any] | None, effort: str | None
    ) -> Mapping[str, Any] | None:
        """Add the reasoning effort to a template's variables.

        Args:
            variables: the client's variables; these take precedence.
            effort: such as "low"; "none" also switches off `enable_thinking`.
        """
        if effort is None:
            return variables
        switches: dict[str, Any] = {"reasoning_effort": effort}
        if effort == "none":
            switches["enable_thinking"] = False
        known = {name: value for name, value in switches.items() if name in self.variables}
        return {**known, **(variables or {})}


class _GenerationBlock(Extension):
    """Parse ``{% generation %}…{% endgeneration %}``, which marks text for training only."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON as in the models' training: no HTML escapes, non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
