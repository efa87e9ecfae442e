"""Define the response objects of Anthropic's Messages API."""

from typing import Any, Literal

from pydantic import BaseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(BaseModel):
    """The cost of a message; `input_tokens` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class TextContent(BaseModel):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class Thinking(BaseModel):
    """What the model thought; the signature is empty, as thoughts are not checked here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(BaseModel):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Thinking | TextContent | ToolUse


class AnthropicMessage(BaseModel):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int
