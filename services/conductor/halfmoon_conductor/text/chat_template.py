"""Render a conversation into the text that the model was trained to continue.

Chat templates are Jinja programs that come with the model. `template_environment` has what they
may use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.text.message_forms import TemplateMessage, find_message_forms
from halfmoon_conductor.text.template_environment import template_environment
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable

#: Stands behind the text that is to be continued, while a template renders.
_CONTINUE_HERE = "HALFMOON_CONTINUES_HERE "


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: texts by name, such as ``bos_token``, for the template to write.

    Raises:
        TokenizerUnavailable: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = template_environment()
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
            #: Names that the template reads.
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerUnavailable(
                f"the chat template is not valid Jinja: {error.message}, line {error.lineno}"
            ) from None
        self._forms = find_message_forms(
            lambda messages, tools: self._write(messages, tools, add_generation_prompt=False)
        )

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation, with BOS where the template writes one.

        Args:
            messages: as `MessageForms.of` takes them.
            add_generation_prompt: end with the start of an assistant's turn.
            continue_final_message: end with the text of the last message, whose turn stays open.
            variables: more names for the template (``enable_thinking`` and such).
            tools: the tools that the model may call, as OpenAI writes them.
            documents: for models that answer from documents.

        Raises:
            InvalidRequest: the template refuses the conversation; the text is the template's.
            MemoryError: the template takes more than there is.
        """
        formed = [self._forms.of(message) for message in messages]
        final = _mark_end(formed) if continue_final_message else ""
        try:
            text = self._write(
                formed,
                tools,
                variables=variables,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:  # no refusal: it says nothing about other conversations
            raise
        except Exception as error:  # the template is a foreign program: any error is a refusal
            raise InvalidRequest(
                f"this model's chat template refuses these messages: {error}", param="messages"
            ) from None
        return _cut_at_mark(text, final) if continue_final_message else text

    def _write(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
    ) -> str:
        return self._template.render(
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                # Templates test whether these are none; an undefined name is not.
                "tools": list(tools) or None,
                "documents": list(documents) or None,
            }
        )

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


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text.

    Raises:
        InvalidRequest: the message has none.
    """
    content = messages[-1].get("content")
    if isinstance(content, list):
        *parts, last = content
        messages[-1]["content"] = [*parts, {**last, "text": last["text"] + _CONTINUE_HERE}]
        return str(last["text"])
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message is true, and the last message has no content to continue.",
            param="continue_final_message",
        )
    messages[-1]["content"] = content + _CONTINUE_HERE
    return content


def _cut_at_mark(text: str, final: str) -> str:
    """Return a rendered text up to the mark, as transformers cuts it.

    Raises:
        InvalidRequest: the template left the text or the mark out.
    """
    mark = _CONTINUE_HERE.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message is true, and this model's chat template does not write the "
            "last message's content as it is; end with a message that it writes.",
            param="continue_final_message",
        )
    if text[at : at + len(_CONTINUE_HERE)] == _CONTINUE_HERE:
        return text[:at]
    return text[:at].rstrip()  # the template trims contents
