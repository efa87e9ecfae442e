"""Choose among the chat templates of a model, as transformers does."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.text.chat_template import ChatTemplate
from halfmoon_conductor.text.tokenizer_interface import Tokenizer

#: Names of the template for most conversations, and of that for those with tools.
DEFAULT, TOOL_USE = "default", "tool_use"


class NamedTemplates:
    """The compiled chat templates of a model, which may have none.

    Args:
        tokenizer: the model's.

    Raises:
        TokenizerUnavailable: one of the templates is not valid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        sources = tokenizer.chat_templates
        self._names = sorted(sources)
        # No request can choose the others.
        self._templates = {
            name: ChatTemplate(sources[name], tokenizer.special_tokens)
            for name in (DEFAULT, TOOL_USE)
            if name in sources
        }

    def choose(self, tools: Sequence[Any]) -> ChatTemplate:
        """Return the template for a conversation with these tools.

        Raises:
            InvalidRequest: there is none.
        """
        chosen = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
        for name in chosen:
            if name in self._templates:
                return self._templates[name]
        if not self._names:
            raise InvalidRequest("This model has no chat template; use /v1/completions.")
        raise InvalidRequest(
            f"This model's chat templates are {', '.join(self._names)[:200]}, and none is the "
            "default; name one of them default in the model's folder, or use /v1/completions."
        )


def source_with_tools(sources: Mapping[str, str]) -> str:
    """Return the source of the template that conversations with tools get; empty: none."""
    return sources.get(TOOL_USE) or sources.get(DEFAULT) or ""
