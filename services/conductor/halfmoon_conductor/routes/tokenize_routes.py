"""``/tokenize`` and ``/detokenize``: what the model makes of a text, in vLLM's shapes."""

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.openai.openai_requests import ChatMessage
from halfmoon_conductor.api.request_fields import (
    MAX_MESSAGES,
    ApiModel,
    IgnoredValues,
    Text,
    TokenId,
    Variables,
)
from halfmoon_conductor.inputs.input_processor import InputProcessor

#: A context of a million tokens fits.
_MAX_TOKENS = 2**20


class TokenizeRequest(ApiModel):
    """A text or a conversation."""

    model: Text | None = Field(None, description="Left out: the one that is served.")
    prompt: Text | None = Field(None, description="This, or messages.")
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    add_special_tokens: bool | None = Field(
        None, description="Default true for a prompt: begin with BOS if the model wants one."
    )
    add_generation_prompt: bool | None = Field(None, description="Default true; of messages.")
    chat_template_kwargs: Variables | None = None
    return_token_strs: bool | None = Field(None, description="Say how the tokens look, too.")

    continue_final_message: Annotated[Any, IgnoredValues(False)] = None
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
        return self


class TokenizeResponse(BaseModel):
    """Its tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ApiModel):
    """Tokens."""

    model: Text | None = Field(None, description="Left out: the one that is served.")
    tokens: list[TokenId] = Field(max_length=_MAX_TOKENS, fail_fast=True)


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str


def tokenize_body(
    intake: InputProcessor, body: TokenizeRequest, *, here: bool = False
) -> TokenizeResponse:
    """The tokens of a text, or of a conversation as the chat template writes it.

    Raises:
        ApiError: as `InputProcessor.encode_messages` and `InputProcessor.encode`.
        NotShort: `here`, and it is much work.
    """
    card = intake.card(body.model)
    if body.messages is not None:
        tokens = intake.encode_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
            here=here,
        )
    else:
        tokens = intake.encode(body.prompt or "", body.add_special_tokens is not False)
    strings = [intake.token_text(each) for each in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=card.max_context, tokens=tokens, token_strs=strings
    )


def detokenize_body(intake: InputProcessor, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens; special ones have none.

    Raises:
        ApiError: one of them is none of the model's.
    """
    intake.card(body.model)
    return DetokenizeResponse(prompt=intake.decode(body.tokens))


def tokenizing_router(
    intake: InputProcessor, responses: dict[int | str, dict[str, Any]], route_class: type[APIRoute]
) -> APIRouter:
    """The two routes; `route_class` reads their bodies."""
    router = APIRouter(responses=responses, route_class=route_class)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The tokens of a text, or of a conversation as the chat template writes it."""
        return tokenize_body(intake, body, here=True)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens; special ones have none."""
        return detokenize_body(intake, body)

    return router
