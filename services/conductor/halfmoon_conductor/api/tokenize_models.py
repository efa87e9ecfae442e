"""Define the requests and responses of ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.label_fields import Word
from halfmoon_conductor.api.openai.chat_messages import AnyMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.api.request_fields import (
    MAX_MESSAGES,
    ApiModel,
    IgnoredValues,
    Text,
    TokenId,
    Variables,
)
from halfmoon_conductor.api.template_switches import check_ending, check_same
from halfmoon_conductor.api.tool_fields import Tools, check_tool_choice

#: A context of a million tokens fits.
_MAX_TOKENS = 2**20


class TokenizeRequest(ApiModel):
    """A text or a conversation to tokenize."""

    model: Text | None = Field(None, description="Left out: the one that is served.")
    prompt: Text | None = Field(None, description="This, or messages.")
    messages: list[AnyMessage] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    add_special_tokens: bool | None = Field(
        None, description="Default true for a prompt: begin with BOS if the model wants one."
    )
    add_generation_prompt: bool | None = Field(None, description="Default true; of messages.")
    continue_final_message: bool | None = Field(
        None, description="End with the text of the last message, whose turn stays open."
    )
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = Field(None, description="As in chats.")
    reasoning_effort: Word | None = Field(None, description="As in chats.")
    tools: Tools | None = Field(None, description="Functions that the model is told of.")
    return_token_strs: bool | None = Field(None, description="Say how the tokens look, too.")

    chat_template: Annotated[Any, IgnoredValues()] = None
    media_io_kwargs: Annotated[Any, IgnoredValues({})] = None
    mm_processor_kwargs: Annotated[Any, IgnoredValues({})] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise contradiction("prompt", "send either prompt or messages")
        if self.messages is None and self.tools:
            raise contradiction("tools", "tools is only for messages")
        if self.messages is not None and self.add_special_tokens:
            raise contradiction(
                "add_special_tokens",
                "add_special_tokens is not for messages: the chat template writes those tokens",
            )
        check_tool_choice(self.tools or (), None)
        check_same("enable_thinking", self.enable_thinking, self.chat_template_kwargs)
        check_ending(self)
        return self

    def as_chat(self, messages: Sequence[AnyMessage]) -> ChatRequest:
        """Return the conversation as a chat completion has it."""
        return ChatRequest(
            model=self.model or "",
            messages=[*messages],
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            reasoning_effort=self.reasoning_effort,
        )


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ApiModel):
    """Tokens to turn into text."""

    model: Text | None = Field(None, description="Left out: the one that is served.")
    tokens: list[TokenId] = Field(max_length=_MAX_TOKENS, fail_fast=True)


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str
