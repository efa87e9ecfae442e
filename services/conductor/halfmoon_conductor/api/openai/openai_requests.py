"""Define the requests of OpenAI's completions and chat completions, with vLLM's additions.

`request_fields` explains the kinds of fields and how unsupported ones are refused.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    model_validator,
)

from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.label_fields import Word
from halfmoon_conductor.api.openai.chat_messages import AnyMessage, Content
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    ApiModel,
    IgnoredValues,
    Prompt,
    Variables,
)
from halfmoon_conductor.api.template_switches import (
    begins_turn,
    check_ending,
    check_same,
    continues_turn,
)
from halfmoon_conductor.api.tool_fields import (
    AllowedChoice,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    check_tool_choice,
)
from halfmoon_protocol.sampling import MAX_TOP_LOGPROBS


class CompletionRequest(SharedFields):
    """Complete a text."""

    prompt: Prompt = Field(
        description="A text or a list of token ids, or a list of several of one of these."
    )
    add_special_tokens: bool | None = Field(
        None, description="Default true: begin with the BOS token if the model wants one."
    )

    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Log probabilities of the answer's tokens (with echo, the prompt's too), and "
        "of so many likeliest ones at each place.",
    )

    best_of: Annotated[Any, IgnoredValues(1)] = None
    suffix: Annotated[Any, IgnoredValues("")] = None
    prompt_embeds: Annotated[Any, IgnoredValues()] = None

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.n_new_tokens == 0 and not self.echo:
            raise contradiction(
                "max_tokens", "max_tokens is 0, which is only for echo: true; ask for 1 or more"
            )
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise contradiction(
                "n",
                "prompts times n is {n}, over the {most} answers that one request may have",
                n=len(self.prompts) * (self.n or 1),
                most=MAX_CHOICES,
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def n_characters(self) -> int:
        """Characters of the prompts that are texts and need tokenizing."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    @property
    def n_top(self) -> int | None:
        """Number of likeliest tokens to report beside each new one, as `logprobs` says."""
        return self.logprobs

    @property
    def n_prompt_top(self) -> int | None:
        """Number of likeliest tokens beside each prompt token; with `echo`, as `logprobs` says."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


class Prediction(ApiModel):
    """The client's prediction of the answer."""

    type: Literal["content"]
    content: Content


class ChatRequest(SharedFields):
    """Answer a conversation."""

    messages: list[AnyMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool | None = Field(
        None, description="Default true: let the model begin a turn of its own."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Go on with the last message, such as the beginning of an answer; "
        "add_generation_prompt is then false.",
    )
    documents: list[dict[str, JsonValue]] | None = Field(
        None,
        max_length=MAX_DOCUMENTS,
        fail_fast=True,
        description="Given to a chat template that reads documents; else changes nothing.",
    )
    chat_template_kwargs: Variables | None = Field(
        None, description="More names for the model's chat template, such as enable_thinking."
    )
    enable_thinking: bool | None = Field(
        None,
        description="The same name in chat_template_kwargs, as other servers' clients send it.",
    )

    logprobs: bool | None = Field(None, description="Log probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With logprobs: so many likeliest tokens at each place.",
    )

    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Default auto.")
    parallel_tool_calls: bool | None = Field(None, description="Default true; false: one call.")
    prediction: Prediction | None = Field(
        None, description="Changes nothing: what an answer may be is not used to hasten it."
    )
    reasoning_effort: Word | None = Field(
        None, description="Given to a chat template that has such a switch; else changes nothing."
    )
    verbosity: Word | None = Field(None, description="Changes nothing: models have no such switch.")

    functions: Annotated[Any, IgnoredValues([])] = None
    function_call: Annotated[Any, IgnoredValues("none")] = None
    modalities: Annotated[Any, IgnoredValues(["text"])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    web_search_options: Annotated[Any, IgnoredValues()] = None
    chat_template: Annotated[Any, IgnoredValues()] = None
    echo: Annotated[Any, IgnoredValues(False)] = None
    add_special_tokens: Annotated[Any, IgnoredValues(False)] = None
    include_reasoning: Annotated[Any, IgnoredValues(True)] = None
    media_io_kwargs: Annotated[Any, IgnoredValues({})] = None
    mm_processor_kwargs: Annotated[Any, IgnoredValues({})] = None
    return_prompt_text: Annotated[Any, IgnoredValues(False)] = None

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.n_new_tokens == 0:
            raise contradiction("max_tokens", "max_tokens is 0; ask for 1 or more")
        check_tool_choice(self.tools or (), self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            raise contradiction(
                "top_logprobs", "top_logprobs is only for requests with logprobs: true"
            )
        check_same("enable_thinking", self.enable_thinking, self.chat_template_kwargs)
        check_ending(self)
        return self

    @property
    def begins_turn(self) -> bool:
        """True if the model begins a turn of its own."""
        return begins_turn(self)

    @property
    def continues_turn(self) -> bool:
        """True if the model goes on with the last message."""
        return continues_turn(self)

    @property
    def template_variables(self) -> dict[str, JsonValue] | None:
        """Names that the client gives to the chat template."""
        if self.enable_thinking is None:
            return self.chat_template_kwargs
        return {**(self.chat_template_kwargs or {}), "enable_thinking": self.enable_thinking}

    @property
    def n_characters(self) -> int:
        """Rough number of characters of all that the conversation's text is made of."""
        fields = (self.offered_tools, self.chat_template_kwargs, self.documents)
        others = sum(len(str(each or "")) for each in fields)
        return others + sum(message.n_characters for message in self.messages)

    @property
    def n_top(self) -> int | None:
        """Number of likeliest tokens to report beside each new one; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the model is told about."""
        return [] if self.tool_choice == "none" else (self.tools or [])

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def max_calls(self) -> int:
        """Most calls in one answer."""
        return 1 if self.parallel_tool_calls is False else MAX_CHOICES
