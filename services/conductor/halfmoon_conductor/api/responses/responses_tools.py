"""Define tools of OpenAI's Responses API: functions, their calls and results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from halfmoon_conductor.api.openai.chat_messages import CallingMessage, ChatMessage
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    MAX_PARTS,
    ApiModel,
    IgnoredValues,
    Text,
    form_discriminator,
    reject_unknown_fields,
)
from halfmoon_conductor.api.tool_fields import (
    AllowedChoice,
    CalledTool,
    Name,
    NamedTool,
    Tool,
    UnservedTool,
    object_text,
    reject_other_types,
)

#: Tools that OpenAI's own server runs, and tools whose calls have a form that no answer here has.
LeftOutType = Literal[
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "apply_patch",
    "custom",
    "local_shell",
    "namespace",
    "shell",
    "tool_search",
]


class LeftOutTool(UnservedTool):
    """A tool of a type that no answer here can call."""

    type: LeftOutType


class FunctionTool(ApiModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Whatever the choice: its arguments keep to the schema."
    )

    allowed_callers: Annotated[Any, IgnoredValues()] = None
    async_: Annotated[Any, IgnoredValues(False)] = Field(None, alias="async")
    defer_loading: Annotated[Any, IgnoredValues(False)] = None
    output_schema: Annotated[Any, IgnoredValues()] = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        reject_other_types(("function",), body, "functions of your own are")
        return reject_unknown_fields(cls, body)

    def as_chat(self) -> Tool:
        """Return the tool as chat completions have it."""
        return Tool.of(self.name, self.description, self.parameters, self.strict)


class FunctionChoiceByName(ApiModel):
    """The choice of one function that must be called."""

    type: Literal["function"]
    name: Name

    def as_chat(self) -> NamedTool:
        """Return the choice as chat completions have it."""
        return NamedTool.of(self.name)


class AllowedFunctions(ApiModel):
    """The choice of some functions that may be called; the model is told of all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoiceByName] = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)

    def as_chat(self) -> AllowedChoice:
        """Return the choice as chat completions have it."""
        return AllowedChoice.of(self.mode, [tool.name for tool in self.tools])


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _tool_form(value: Any) -> str:
    return "left out" if _type_of(value) in get_args(LeftOutType) else "own function"


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "word"
    kind = _type_of(value)
    if kind == "allowed_tools":
        return "allowed"
    return "one" if isinstance(value, dict | FunctionChoiceByName) else None


def _known_choice(value: Any) -> Any:
    known = ("function", "allowed_tools")
    return reject_other_types(known, value, "a function's name is, and allowed_tools")


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("own function")] | Annotated[LeftOutTool, Tag("left out")],
    Discriminator(_tool_form),
]
OfferedTools = Annotated[list[OfferedTool], Field(max_length=MAX_CHOICES, fail_fast=True)]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FunctionChoiceByName, Tag("one")]
    | Annotated[AllowedFunctions, Tag("allowed")],
    form_discriminator(
        "must be none, auto, required, or an object that names functions", _choice_form
    ),
    BeforeValidator(_known_choice),
]


class FunctionCallItem(ApiModel):
    """A call of an earlier answer, sent back by the client."""

    type: Literal["function_call"]
    call_id: Text
    name: Name
    arguments: Annotated[Text, AfterValidator(object_text)] = Field(
        description="A JSON object, as its text."
    )
    id: Text | None = None
    status: Text | None = None

    async_: Annotated[Any, IgnoredValues(False)] = Field(None, alias="async")
    caller: Annotated[Any, IgnoredValues()] = None
    namespace: Annotated[Any, IgnoredValues()] = None

    def as_call(self) -> CalledTool:
        """Return the call as chat completions have it."""
        return CalledTool.of(self.call_id, self.name, self.arguments)


class ReasoningPart(ApiModel):
    """A part of thoughts, or of a summary of them."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


_Thoughts = Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class EchoedReasoning(ApiModel):
    """What the model thought before an earlier answer, sent back by the client."""

    type: Literal["reasoning"]
    summary: _Thoughts | None = None
    content: _Thoughts | None = None
    id: Text | None = None
    status: Text | None = None
    encrypted_content: Text | None = Field(None, description="Left out: it is another server's.")

    @property
    def text(self) -> str:
        """The thoughts, or else their summary."""
        return "\n".join(part.text for part in self.content or self.summary or ())


def group_calls_into_turns(
    messages: Sequence[ChatMessage | FunctionCallItem | EchoedReasoning],
) -> list[ChatMessage | CallingMessage]:
    """Return a conversation in which calls and thoughts belong to the messages that they are of.

    Consecutive calls become one message of the assistant, with the text before them. Thoughts
    belong to the assistant's message behind them.
    """
    turns: list[ChatMessage | CallingMessage] = []
    thoughts: list[str] = []
    for message in messages:
        if isinstance(message, EchoedReasoning):
            thoughts.append(message.text)
            continue
        _add_turn(turns, message)
        if thoughts and turns[-1].role == "assistant":
            known = turns[-1].reasoning_content
            thought = "\n".join([known, *thoughts] if known else thoughts)
            turns[-1] = turns[-1].model_copy(update={"reasoning_content": thought})
        thoughts.clear()
    return turns


def _add_turn(
    turns: list[ChatMessage | CallingMessage], message: ChatMessage | FunctionCallItem
) -> None:
    if isinstance(message, ChatMessage):
        turns.append(message)
        return
    last = turns[-1] if turns else None
    if isinstance(last, CallingMessage):
        calls = [*last.tool_calls, message.as_call()]
        turns[-1] = last.model_copy(update={"tool_calls": calls})
    elif last is not None and last.role == "assistant":
        turns[-1] = CallingMessage(
            role="assistant",
            content=last.content,
            tool_calls=[message.as_call()],
            reasoning_content=last.reasoning_content,
        )
    else:
        turns.append(CallingMessage(role="assistant", tool_calls=[message.as_call()]))
