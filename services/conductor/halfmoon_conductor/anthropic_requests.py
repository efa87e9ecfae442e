"""What clients of Anthropic's Messages API may ask: its shapes, as far as they are of text."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.openai_requests import ChatMessage, ChatRequest, TextPart
from halfmoon_conductor.request_fields import (
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID,
    Neutral,
    Salt,
    Shape,
    StopString,
    Text,
    one_of,
    text_or_list,
)


class TextBlock(TextPart):
    """A part of a content; only text is supported."""

    cache_control: dict[str, Any] | None = Field(
        None, description="Taken and not needed: equal prefixes find their cache by themselves."
    )
    citations: Annotated[Any, Neutral([])] = None


Blocks = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextBlock], Field(min_length=1, fail_fast=True), Tag("list")],
    one_of("must be a string or a list of text blocks", text_or_list),
]


class Turn(Shape):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Blocks


class Metadata(Shape):
    """About the request."""

    user_id: Text | None = Field(None, description="A label; changes nothing.")


class CountTokensRequest(Shape):
    """A conversation, whose tokens are to be counted."""

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: Blocks | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="vLLM's: more names for the model's chat template."
    )

    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral({"type": "none"}, {"type": "auto"})] = None
    thinking: Annotated[Any, Neutral({"type": "disabled"})] = None
    mcp_servers: Annotated[Any, Neutral([])] = None
    context_management: Annotated[Any, Neutral()] = None
    output_config: Annotated[Any, Neutral({})] = None
    cache_control: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> "CountTokensRequest":
        if self.messages[-1].role != "user":
            raise PydanticCustomError(
                "contradiction",
                "the last message must be the user's; going on with one of the assistant's is not "
                "supported",
            )
        return self

    def chat_messages(self) -> list[ChatMessage]:
        """The conversation as a chat, the system's words first."""
        turns = [("system", self.system)] if self.system is not None else []
        turns += [(turn.role, turn.content) for turn in self.messages]
        return [
            ChatMessage.model_validate({"role": role, "content": _text(content)})
            for role, content in turns
        ]


class MessagesRequest(CountTokensRequest):
    """Answer a conversation."""

    max_tokens: int = Field(ge=1, le=MAX_TOKEN_ID)
    stop_sequences: list[StopString] | None = Field(
        None, max_length=MAX_STOP_STRINGS, fail_fast=True
    )
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    stream: bool | None = None
    metadata: Metadata | None = None
    cache_salt: Salt | None = Field(
        None, description="Halfmoon's own: share cached prefixes only with the same salt."
    )

    service_tier: Annotated[Any, Neutral("auto", "standard_only")] = None
    container: Annotated[Any, Neutral()] = None
    inference_geo: Annotated[Any, Neutral()] = None
    ec_transfer_params: Annotated[Any, Neutral()] = None
    kv_transfer_params: Annotated[Any, Neutral()] = None
    mm_payload: Annotated[Any, Neutral("tensors")] = None
    return_mm_kwargs: Annotated[Any, Neutral(True)] = None
    vllm_xargs: Annotated[Any, Neutral({})] = None
    watermarking: Annotated[Any, Neutral(False)] = None

    def as_chat(self) -> ChatRequest:
        """The same wishes as a chat completion."""
        return ChatRequest(
            model=self.model,
            messages=[*self.chat_messages()],
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            chat_template_kwargs=self.chat_template_kwargs,
            cache_salt=self.cache_salt,
        )


def _text(content: str | list[TextBlock] | None) -> str:
    if isinstance(content, list):
        return "\n".join(block.text for block in content)
    return content or ""
