"""Encode prompts and conversations as token ids of the model, within its context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from halfmoon_conductor.api.openai.chat_messages import CallingMessage, ChatMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotSupported,
    ServiceUnavailable,
    UnknownModel,
)
from halfmoon_conductor.text.echoed_prompt import echo_of_tokens
from halfmoon_conductor.text.named_templates import NamedTemplates, source_with_tools
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_conductor.tools.tool_call_syntax import tool_call_format_of

#: Seconds after which clients should retry while workers are still loading the model.
RETRY_WHILE_LOADING_S = 2.0
_SHOWN_CHARACTERS = 200


class PromptEncoder:
    """Encode what clients send with the model's chat template and tokenizer.

    Used on the event loop for token ids, and in child processes for texts.

    Args:
        model: returns the model served, or None before the first worker has joined.
        tokenizer: the model's.
        tool_call_parser: how the model writes calls; "auto": as its chat template shows.
        aliases: other names of the model; one that ends in "*" is any name that begins so.
        missing_hint: returns why there are no workers, where that is known; else "".

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """

    def __init__(
        self,
        model: Callable[[], ModelCard | None],
        tokenizer: Tokenizer,
        tool_call_parser: ToolCallFormat | Literal["auto"] = "auto",
        aliases: Sequence[str] = (),
        missing_hint: Callable[[], str] = str,
    ) -> None:
        self._model = model
        self._missing_hint = missing_hint
        self._aliases = frozenset(aliases)
        self._alias_beginnings = tuple(each[:-1] for each in aliases if each.endswith("*"))
        self._tokenizer = tokenizer
        source = source_with_tools(tokenizer.chat_templates)
        self._tool_call_format = (
            tool_call_format_of(source) if tool_call_parser == "auto" else tool_call_parser
        )
        self._tells_of_tools = "tools" in source
        self._templates = NamedTemplates(tokenizer)

    def model_card(self, name: str | None) -> ModelCard:
        """Return the model of this name; with None, the model served.

        Raises:
            ServiceUnavailable: the workers have not joined yet.
            UnknownModel: another model is served.
        """
        card = self._model()
        if card is None:
            said = (
                "No model is served yet: a prefill and a decode worker have to join first, as "
                "/ready tells; try again soon."
            )
            if hint := self._missing_hint():
                said = f"{said} {hint}"
            raise ServiceUnavailable(said, retry_after_s=RETRY_WHILE_LOADING_S)
        if name not in (None, card.name) and not self._is_alias(name or ""):
            raise UnknownModel(
                f"The model {_shown(name or '')} is not served here; {card.name!r} is.",
                param="model",
            )
        return card

    def _is_alias(self, name: str) -> bool:
        return name in self._aliases or name.startswith(self._alias_beginnings)

    # -- completions -------------------------------------------------------------------------

    def encode_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of a completion's prompts.

        Call it on the event loop only for short prompts of token ids.

        Raises:
            InvalidRequest: a prompt has no tokens, or ids that the model does not have.
            ContextLengthExceeded: a prompt and its new tokens do not fit into the context.
        """
        add_special_tokens = body.add_special_tokens is not False
        prompts: list[list[int]] = []
        for given, param in _named_prompts(body):
            prompt = (
                self._encode(given, add_special_tokens, param)
                if isinstance(given, str)
                else self.check_token_ids(given, param)
            )
            if not prompt:
                raise InvalidRequest(
                    f"{param} is empty, and this model has no token of its own to begin with.",
                    param=param,
                )
            self.check_context(body, len(prompt), param)
            prompts.append(prompt)
        return prompts

    def echoed_prompts(self, body: CompletionRequest) -> tuple[str, ...]:
        """Return the text of each prompt if the completion asks for `echo`, else nothing."""
        if not body.echo:
            return ()
        return tuple(
            given if isinstance(given, str) else echo_of_tokens(self._tokenizer, given)
            for given in body.prompts
        )

    # -- chats -------------------------------------------------------------------------------

    def encode_chat(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a chat that is to be answered; see `encode_conversation`.

        Raises:
            InvalidRequest, NotSupported, ContextLengthExceeded: as `encode_conversation`, and if
                it has no tokens or too many.
        """
        token_ids = self.encode_conversation(body)
        if not token_ids:
            raise InvalidRequest("The conversation has no tokens.", param="messages")
        self.check_context(body, len(token_ids), "messages")
        return token_ids

    def encode_conversation(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a chat, its tools included.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the conversation.
            NotSupported: it offers tools, and how the model calls them is not known.
            ContextLengthExceeded: its text can't fit into the context.
        """
        self.tool_call_format(body)
        return self.encode_messages(
            body.messages,
            add_generation_prompt=body.begins_turn,
            continue_final_message=body.continues_turn,
            variables=body.template_variables,
            effort=body.reasoning_effort,
            tools=[tool.for_template() for tool in body.offered_tools],
            documents=body.documents or (),
        )

    def encode_messages(
        self,
        messages: Sequence[ChatMessage | CallingMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of messages; see `encode_conversation`.

        Raises:
            InvalidRequest, ContextLengthExceeded: as `encode_conversation`.
        """
        template = self._templates.choose(tools)
        text = template.render(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template.with_effort(variables, effort),
            tools=tools,
            documents=documents,
        )
        # The template has written BOS where the model wants one.
        return self._encode(text, False, "messages")

    def tool_call_format(self, body: ChatRequest) -> ToolCallFormat | None:
        """Return how this model writes tool calls; None if calls are not told from text.

        That is so if the chat offers no tools, and if the model's template tells of them in a way
        that is not known.

        Raises:
            NotSupported: the chat offers tools that the template would leave out, or asks for
                calls of a form, and the model's form is not known.
        """
        if not body.offered_tools or self._tool_call_format is not None:
            return self._tool_call_format if body.offered_tools else None
        strict = any(tool.function.strict for tool in body.offered_tools)
        if self._tells_of_tools and not strict and body.tool_choice in (None, "auto"):
            return None
        what = (
            f"{'a strict function' if strict else 'this tool_choice'} needs to know how it writes "
            "calls, which its chat template does not show"
            if self._tells_of_tools
            else "its chat template tells the model of none"
        )
        raise NotSupported(
            f"tools is not supported with this model: {what}; start the conductor with "
            "--tool-call-parser.",
            param="tools",
        )

    # -- texts and tokens --------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Raises:
            InvalidRequest, ContextLengthExceeded: it is not Unicode, or can't fit into the
                context.
        """
        return self._encode(text, add_special_tokens, "prompt")

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens.

        Raises:
            InvalidRequest: the model does not have one of them.
        """
        return (
            self._tokenizer.decode(self.check_token_ids(token_ids, "tokens")) if token_ids else ""
        )

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself."""
        return self._tokenizer.token_bytes(token).decode(errors="replace")

    # -- checks ------------------------------------------------------------------------------

    def check_context(self, body: SharedFields, n_prompt: int, param: str) -> None:
        """Check that a prompt and the requested new tokens fit into the context.

        Raises:
            ContextLengthExceeded: they don't.
        """
        card = self.model_card(None)
        requested = body.n_generated_tokens
        if requested is None and card.max_tokens <= n_prompt < card.max_context:
            raise ContextLengthExceeded(
                f"The largest workers here have memory for {card.max_tokens} tokens of prompt and "
                f"answer, and {_noun(param)} {n_prompt} (the model's context is "
                f"{card.max_context}). Shorten it, or have the operator raise --pool-mib of the "
                "workers.",
                param=param,
            )
        if n_prompt + (requested or 1) > card.max_context:
            raise ContextLengthExceeded(
                f"This model's context is {card.max_context} tokens; {_noun(param)} {n_prompt}, "
                f"and {requested or 'at least 1'} more were asked for. Shorten the prompt or ask "
                "for fewer new tokens.",
                param=param,
            )

    def check_token_ids(self, token_ids: list[int], param: str) -> list[int]:
        """Return token ids unchanged if the model has all of them.

        Raises:
            InvalidRequest: an id is over the model's vocabulary.
        """
        if (largest := max(token_ids)) >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {largest}; this model's are less than "
                f"{self._tokenizer.vocab_size}.",
                param=param,
            )
        return token_ids

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Return the token ids of a text that may fit into the context.

        Raises:
            InvalidRequest: it is not Unicode, or has a token that the model does not embed.
            ContextLengthExceeded: it has more bytes than a context full of the longest token.
        """
        longest, most = self._tokenizer.longest_token_bytes, self.model_card(None).max_context
        # 4 bytes a character at the most: nearly all texts need not be counted.
        if 4 * len(text) > most * longest:
            n_bytes = len(text.encode(errors="replace"))
            if n_bytes > most * longest:
                raise ContextLengthExceeded(
                    f"The text of {param} has {n_bytes} bytes. This model's context is {most} "
                    f"tokens, and its longest token has {longest} bytes: at least "
                    f"{-(-n_bytes // longest)} tokens are too many. Shorten it.",
                    param=param,
                )
        try:
            return self._check_embedded(
                self._tokenizer.encode(text, add_special_tokens=add_special_tokens), param
            )
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} is not Unicode text: {error.reason}", param=param
            ) from None

    def _check_embedded(self, token_ids: list[int], param: str) -> list[int]:
        unembedded = self._tokenizer.unembedded_tokens
        found = (
            next((token for token in token_ids if token in unembedded), None)
            if unembedded
            else None
        )
        if found is not None:
            raise InvalidRequest(
                f"{param} has the token {_shown(unembedded[found])} ({found}), which this model "
                f"does not embed: its tokens are less than {self._tokenizer.vocab_size}. Leave it "
                "out, or serve a model whose embeddings were resized.",
                param=param,
            )
        return token_ids


def prompt_names(body: CompletionRequest) -> list[str]:
    """Return the name of each prompt of a completion, for errors: its place, if it is in a list."""
    n = len(body.prompts)
    is_alone = body.prompts is not body.prompt
    return ["prompt"] if is_alone else [f"prompt[{index}]" for index in range(n)]


def _named_prompts(body: CompletionRequest) -> Iterator[tuple[str | list[int], str]]:
    return zip(body.prompts, prompt_names(body), strict=True)


def _noun(param: str) -> str:
    return f"{param} has" if "[" in param else "the prompt has"


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")
