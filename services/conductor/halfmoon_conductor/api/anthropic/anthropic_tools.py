"""Define tools of Anthropic's Messages API: tools on offer, calls and their results."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.openai.chat_messages import CallingMessage, ChatMessage, TextPart
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    MAX_PARTS,
    ApiModel,
    IgnoredValues,
    Parts,
    Text,
    form_discriminator,
    reject_unknown_fields,
    text_or_list_form,
)
from halfmoon_conductor.api.tool_fields import (
    CalledTool,
    Name,
    NamedTool,
    Tool,
    UnservedTool,
    reject_other_types,
)

#: Tools that Anthropic's own server runs, with the day of their version.
_SERVER_TOOL = "^(web_search|web_fetch|code_execution)_[0-9]{8}$"
#: Accepted and not needed: equal prefixes find their cache by themselves.
CacheControl = Annotated[
    dict[str, Any] | None,
    Field(
        description="Taken and not needed: equal prefixes find their cache by themselves.",
    ),
]


class TextBlock(TextPart):
    """A block of text."""

    cache_control: CacheControl = None
    citations: Annotated[Any, IgnoredValues([])] = None


Blocks = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextBlock], Parts, Tag("list")],
    form_discriminator("must be a string or a list of text blocks", text_or_list_form),
]


class ToolUseBlock(ApiModel):
    """A call of an earlier answer, sent back by the client."""

    type: Literal["tool_use"]
    id: Text
    name: Name
    input: dict[str, JsonValue]
    cache_control: CacheControl = None

    caller: Annotated[Any, IgnoredValues({"type": "direct"})] = None


class ToolResultBlock(ApiModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: (
        Annotated[
            Annotated[Text, Tag("text")]
            | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag("list")],
            form_discriminator("must be a string or a list of text blocks", text_or_list_form),
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="A label: what went wrong is in the content.")
    cache_control: CacheControl = None


class ThinkingBlock(ApiModel):
    """What the assistant thought, as it was answered; the chat template may leave it out."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = Field(None, description="Not checked: thoughts are not signed here.")
    cache_control: CacheControl = None


class RedactedThinkingBlock(ApiModel):
    """Thoughts that another server encrypted; they are left out."""

    type: Literal["redacted_thinking"]
    data: Text
    cache_control: CacheControl = None


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _block_form(value: Any) -> str | None:
    kind = _type_of(value)
    known = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    return kind if kind in known else "text"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    form_discriminator("must be a block", _block_form),
]


class AnthropicTurn(ApiModel):
    """One message."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[Block], Parts, Tag("list")],
        form_discriminator("must be a string or a list of blocks", text_or_list_form),
    ]

    def as_chat(self) -> list[ChatMessage | CallingMessage]:
        """Return the same as messages of a chat: results first, then text.

        Raises:
            PydanticCustomError: a user's message has a call or a thought, or an assistant's has a
                result.
        """
        blocks = [] if isinstance(self.content, str) else self.content
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        thoughts = [block for block in blocks if isinstance(block, ThinkingBlock)]
        misplaced: Sequence[ToolUseBlock | ToolResultBlock | ThinkingBlock] = (
            [*calls, *thoughts] if self.role == "user" else results
        )
        if misplaced:
            raise contradiction(
                "messages",
                "a {block} block can't be in a turn of the {role}",
                block=misplaced[0].type,
                role=self.role,
            )
        words = join_text_blocks(
            self.content
            if isinstance(self.content, str)
            else [block for block in blocks if isinstance(block, TextBlock)]
        )
        thought = "\n".join(block.thinking for block in thoughts) or None
        if calls:
            return [
                CallingMessage(
                    role="assistant",
                    content=words or None,
                    tool_calls=[_called(block) for block in calls],
                    reasoning_content=thought,
                )
            ]
        messages = [
            ChatMessage(
                role="tool", tool_call_id=block.tool_use_id, content=join_text_blocks(block.content)
            )
            for block in results
        ]
        if words or not results:
            messages.append(ChatMessage(role=self.role, content=words, reasoning_content=thought))
        return [*messages]


def join_text_blocks(content: str | Sequence[TextBlock] | None) -> str:
    """Join text blocks, each on lines of its own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _called(block: ToolUseBlock) -> CalledTool:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return CalledTool.of(block.id, block.name, arguments)


class ServerTool(UnservedTool):
    """A tool that Anthropic's server would run."""

    type: Annotated[str, Field(pattern=_SERVER_TOOL)]
    name: Name


class AnthropicTool(ApiModel):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, JsonValue] = Field(description="A JSON schema.")
    cache_control: CacheControl = None
    strict: bool | None = Field(
        None, description="Whatever the choice: its input keeps to the schema."
    )
    eager_input_streaming: bool | None = Field(
        None, description="Changes nothing: a call is sent when it is complete."
    )

    allowed_callers: Annotated[Any, IgnoredValues(["direct"])] = None
    defer_loading: Annotated[Any, IgnoredValues(False)] = None
    input_examples: Annotated[Any, IgnoredValues([])] = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        reject_other_types(("custom", None), body, "tools of your own are")
        return reject_unknown_fields(cls, body)

    def as_chat(self) -> Tool:
        """Return the tool as chat completions have it."""
        return Tool.of(self.name, self.description, self.input_schema, self.strict)


class ToolChoiceMode(ApiModel):
    """The choice whether tools are called, and how many."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at the most.")

    def as_chat(self) -> Literal["auto", "required", "none"]:
        """Return the choice as chat completions have it."""
        return "required" if self.type == "any" else self.type


class ToolChoiceByName(ApiModel):
    """The choice of one tool that must be called."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = Field(None, description="It is called once.")

    def as_chat(self) -> NamedTool:
        """Return the choice as chat completions have it."""
        return NamedTool.of(self.name)


def _choice_form(value: Any) -> str | None:
    kind = _type_of(value)
    if kind == "tool":
        return "one"
    return "any" if kind in ("auto", "any", "none") else None


AnthropicToolChoice = Annotated[
    Annotated[ToolChoiceMode, Tag("any")] | Annotated[ToolChoiceByName, Tag("one")],
    form_discriminator("must be an object whose type is auto, any, tool or none", _choice_form),
]


def _tool_form(value: Any) -> str:
    kind = _type_of(value)
    return "server tool" if isinstance(kind, str) and re.search(_SERVER_TOOL, kind) else "own tool"


OfferedTool = Annotated[
    Annotated[AnthropicTool, Tag("own tool")] | Annotated[ServerTool, Tag("server tool")],
    Discriminator(_tool_form),
]
AnthropicTools = Annotated[list[OfferedTool], Field(max_length=MAX_CHOICES, fail_fast=True)]
