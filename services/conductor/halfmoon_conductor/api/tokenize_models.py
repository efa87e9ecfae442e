"""Define the requests and responses of ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.openai.chat_messages import ChatMessage
from halfmoon_conductor.api.request_fields import (
    MAX_MESSAGES,
    ApiModel,
    IgnoredValues,
    Text,
    TokenId,
    Variables,
)
from halfmoon_conductor.api.template_switches import check_ending

#: A context of a million tokens fits.
_MAX_TOKENS = 2**20


class TokenizeRequest(ApiModel):
    """A text or a conversation to tokenize."""

    model: Text | None = Field(None, description="Left out: the one that is served.")
    prompt: Text | None = Field(None, description="This, or messages.")
    messages: list[ChatMessage] | None = Field(
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
    return_token_strs: bool | None = Field(None, description="Say how the tokens look, too.")

    chat_template: Annotated[Any, IgnoredValues()] = None
    media_io_kwargs: Annotated[Any, IgnoredValues({})] = None
    mm_processor_kwargs: Annotated[Any, IgnoredValues({})] = None
    tools: Annotated[Any, IgnoredValues([])] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("contradiction", "send either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise PydanticCustomError(
                "contradiction",
                "add_special_tokens is not for messages: the chat template writes those tokens",
            )
        check_ending(self)
        return self


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
