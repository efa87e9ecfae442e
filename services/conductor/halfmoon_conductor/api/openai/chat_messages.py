"""Define the messages of a conversation, as clients send them and as chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    ApiModel,
    IgnoredValues,
    Parts,
    Text,
    form_discriminator,
    reject_unknown_fields,
    text_or_list_form,
)
from halfmoon_conductor.api.tool_fields import CalledTool


def _only_text(kind: Any) -> Any:
    if kind == "text":
        return kind
    raise PydanticCustomError(
        "not_supported",
        'is {kind}, which is not supported; only parts of type "text" are',
        {"kind": json.dumps(kind)[:100]},
    )


class TextPart(ApiModel):
    """A part of a message's content; only text is supported."""

    type: Annotated[
        Any,
        AfterValidator(_only_text),
        WithJsonSchema({"type": "string", "enum": ["text"]}),
    ]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        # The error in an image part is its type, and not its unknown fields.
        if isinstance(body, dict) and body.get("type", "text") != "text":
            return {"type": body["type"], "text": ""}
        return reject_unknown_fields(cls, body)


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Parts, Tag("list")],
    form_discriminator("must be a string or a list of text parts", text_or_list_form),
]


_THOUGHTS = "What the assistant thought, as it was answered; the chat template may leave it out."


class ChatMessage(ApiModel):
    """One message. An assistant's may be sent back just as it was answered."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is another name for system; tool says what a call gave."
    )
    content: Content
    name: Text | None = None
    tool_call_id: Text | None = Field(None, description="Of role tool: whose result this is.")
    reasoning_content: Text | None = Field(None, description=_THOUGHTS)

    refusal: Annotated[Any, IgnoredValues()] = None
    annotations: Annotated[Any, IgnoredValues([])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    tool_calls: Annotated[Any, IgnoredValues([])] = None
    function_call: Annotated[Any, IgnoredValues()] = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for `MessageForms.of`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": _for_template(self.content),
        }
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message if self.name is None else message | {"name": self.name}

    @property
    def n_characters(self) -> int:
        """Characters of its text and thoughts."""
        return len(_text_of(self.content)) + len(self.reasoning_content or "")


class CallingMessage(ApiModel):
    """An assistant's message with tool calls, sent back by the client."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: list[CalledTool] = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
    reasoning_content: Text | None = Field(None, description=_THOUGHTS)

    refusal: Annotated[Any, IgnoredValues()] = None
    annotations: Annotated[Any, IgnoredValues([])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    function_call: Annotated[Any, IgnoredValues()] = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for `MessageForms.of`, with the arguments of calls as objects."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": None if self.content is None else _for_template(self.content),
            "tool_calls": [call.for_template() for call in self.tool_calls],
        }
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message if self.name is None else message | {"name": self.name}

    @property
    def n_characters(self) -> int:
        """Characters of its text, thoughts and calls."""
        n_thoughts = len(self.reasoning_content or "")
        return len(_text_of(self.content or "")) + n_thoughts + len(str(self.tool_calls))


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _for_template(content: str | list[TextPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _message_form(value: Any) -> str:
    if isinstance(value, dict):
        return "calling" if value.get("tool_calls") else "plain"
    return "calling" if isinstance(value, CallingMessage) else "plain"


AnyMessage = Annotated[
    Annotated[ChatMessage, Tag("plain")] | Annotated[CallingMessage, Tag("calling")],
    Discriminator(_message_form),
]
