"""Define requests of OpenAI's Responses API, as far as they are text."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.label_fields import (
    ClientMetadata,
    Include,
    Label,
    Metadata,
    ObfuscationOptions,
    Options,
    Reasoning,
    Word,
)
from halfmoon_conductor.api.openai.chat_messages import ChatMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.api.request_fields import (
    MAX_PARTS,
    MAX_TOKEN_ID,
    MAX_TURNS,
    ApiModel,
    IgnoredValues,
    Parts,
    Salt,
    Text,
    Variables,
    form_discriminator,
    text_or_list_form,
)
from halfmoon_conductor.api.responses.responses_tools import (
    EchoedReasoning,
    FunctionCallItem,
    FunctionChoice,
    FunctionTool,
    LeftOutTool,
    OfferedTools,
    group_calls_into_turns,
)
from halfmoon_conductor.api.sampling_fields import SamplingFields
from halfmoon_conductor.api.structured_fields import (
    JsonSchema,
    ObjectFormat,
    SchemaFormat,
    StructuredOutputs,
    TextFormat,
    check_format_type,
    format_kind,
)
from halfmoon_conductor.api.tool_fields import check_tool_choice

_TEXT_PARTS = ("input_text", "output_text", "text")


def _only_text(kind: Any) -> Any:
    if kind in _TEXT_PARTS:
        return kind
    raise PydanticCustomError(
        "not_supported", "is not supported; only input_text and output_text are", {}
    )


def _only_messages(kind: Any) -> Any:
    if kind in (None, "message"):
        return kind
    raise PydanticCustomError(
        "not_supported",
        "is not supported; only message, reasoning, function_call, function_call_output and "
        "item_reference are",
        {},
    )


class InputText(ApiModel):
    """A part of a content; an answer's part may be sent back as it was."""

    type: Annotated[
        Any,
        AfterValidator(_only_text),
        WithJsonSchema({"type": "string", "enum": list(_TEXT_PARTS)}),
    ]
    text: Text

    annotations: Annotated[Any, IgnoredValues([])] = None
    logprobs: Annotated[Any, IgnoredValues([])] = None


class InputMessage(ApiModel):
    """One message."""

    type: Annotated[
        Any, AfterValidator(_only_messages), WithJsonSchema({"enum": [None, "message"]})
    ] = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[InputText], Parts, Tag("list")],
        form_discriminator("must be a string or a list of text parts", text_or_list_form),
    ]
    id: Text | None = None
    status: Text | None = None
    phase: Word | None = Field(None, description="A label of an answer; changes nothing.")

    def as_chat(self) -> ChatMessage:
        """Return the message as a chat completion has it."""
        return ChatMessage(role=self.role, content=_joined(self.content))


class FunctionOutput(ApiModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True), Tag("list")],
        form_discriminator("must be a string or a list of text parts", text_or_list_form),
    ]
    id: Text | None = None
    name: Text | None = None
    status: Text | None = None

    caller: Annotated[Any, IgnoredValues()] = None
    namespace: Annotated[Any, IgnoredValues()] = None

    def as_chat(self) -> ChatMessage:
        """Return the result as a chat completion's message."""
        return ChatMessage(role="tool", tool_call_id=self.call_id, content=_joined(self.output))


def _not_replaced(kind: Any) -> Any:
    raise PydanticCustomError(
        "invalid_reference",
        "was not found in the body's text: send strict JSON in UTF-8, a text as id, and at most"
        " 262,144 commas",
        {},
    )


class ItemReference(ApiModel):
    """An item of a stored response, which takes its place before the body is read."""

    type: Annotated[
        Any, AfterValidator(_not_replaced), WithJsonSchema({"enum": ["item_reference"]})
    ]
    id: Text

    def as_chat(self) -> ChatMessage:
        """Raise: none gets this far."""
        raise AssertionError(self)


def _item_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = ("function_call", "function_call_output", "reasoning", "item_reference")
    return kind if kind in known else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[EchoedReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_form),
]


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _leading_instructions(items: Sequence[Item]) -> list[str]:
    """Return the texts of the system's and the developer's messages before all others."""
    texts: list[str] = []
    for item in items:
        if not isinstance(item, InputMessage) or item.role not in ("system", "developer"):
            break
        texts.append(_joined(item.content))
    return texts


class NamedSchema(JsonSchema):
    """A schema without the wrapping that chat completions have."""

    type: Literal["json_schema"]

    def as_chat(self) -> SchemaFormat:
        """Return the schema wrapped as chat completions have it."""
        schema = JsonSchema(name=self.name, schema=self.schema_)
        return SchemaFormat(type="json_schema", json_schema=schema)


class TextConfig(ApiModel):
    """Requirements on the answer's text."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("text")]
            | Annotated[ObjectFormat, Tag("json_object")]
            | Annotated[NamedSchema, Tag("json_schema")],
            form_discriminator("must be an object with a type", format_kind),
            BeforeValidator(check_format_type),
        ]
        | None
    ) = None
    verbosity: Word | None = Field(None, description="Changes nothing: models have no such switch.")

    def as_chat(self) -> TextFormat | ObjectFormat | SchemaFormat | None:
        """Return the same as chat completions ask for it."""
        return self.format.as_chat() if isinstance(self.format, NamedSchema) else self.format


class _ChatOfResponse(ChatRequest):
    """A chat that was sent as a request of this API."""

    format_field: ClassVar[str] = "text"


class ResponsesRequest(SamplingFields):
    """Answer an input."""

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[
            list[Item], Field(min_length=1, max_length=MAX_TURNS, fail_fast=True), Tag("list")
        ],
        form_discriminator(
            "must be a string or a list of messages, calls and their outputs", text_or_list_form
        ),
    ]
    instructions: Text | None = Field(
        None, description="The beginning of the system message, before those of the input."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    text: TextConfig | None = Field(None, description="Any text, a JSON object, JSON of a schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM's chats.")
    chat_template_kwargs: Variables | None = Field(
        None, description="More names for the model's chat template."
    )
    tools: OfferedTools | None = Field(
        None, description="Functions that the model may call; it is not told of other tools."
    )
    tool_choice: FunctionChoice | None = Field(None, description="Default auto.")
    parallel_tool_calls: bool | None = Field(None, description="Default true; false: one call.")
    stream: bool | None = None
    user: Label | None = Field(None, description="A label; changes nothing.")
    safety_identifier: Label | None = Field(None, description="A label; changes nothing.")
    session_id: Label | None = Field(None, description="A label; changes nothing.")
    prompt_cache_key: Label | None = Field(None, description="Taken and not needed.")
    prompt_cache_retention: Word | None = Field(None, description="Taken and not needed.")
    prompt_cache_options: Options | None = Field(None, description="Taken and not needed.")
    metadata: Metadata | None = Field(None, description="Labels, which the answer repeats.")
    client_metadata: ClientMetadata | None = Field(None, description="Labels; change nothing.")
    previous_response_id: Label | None = Field(
        None, description="The stored response whose conversation the input goes on with."
    )
    store: bool | None = Field(
        None, description="Default true, where responses are stored; false: not this one."
    )
    service_tier: Word | None = Field(None, description="Changes nothing: there is one tier.")
    chat_id: Label | None = Field(None, description="A label; changes nothing.")
    include: Include | None = Field(None, description="Only what no answer here has.")
    reasoning: Reasoning | None = Field(None, description="Its effort: see reasoning_effort.")
    stream_options: ObfuscationOptions | None = None
    cache_salt: Salt | None = Field(
        None, description="Share cached prefixes only with the same salt."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31, description="Lower goes first among requests that wait."
    )

    background: Annotated[Any, IgnoredValues(False)] = None
    conversation: Annotated[Any, IgnoredValues()] = None
    context_management: Annotated[Any, IgnoredValues()] = None
    ec_transfer_params: Annotated[Any, IgnoredValues()] = None
    enable_response_messages: Annotated[Any, IgnoredValues(False)] = None
    include_reasoning: Annotated[Any, IgnoredValues(True)] = None
    include_stop_str_in_output: Annotated[Any, IgnoredValues(False)] = None
    kv_transfer_params: Annotated[Any, IgnoredValues()] = None
    max_tool_calls: Annotated[Any, IgnoredValues()] = None
    media_io_kwargs: Annotated[Any, IgnoredValues({})] = None
    mm_payload: Annotated[Any, IgnoredValues("tensors")] = None
    mm_processor_kwargs: Annotated[Any, IgnoredValues({})] = None
    previous_input_messages: Annotated[Any, IgnoredValues([])] = None
    prompt: Annotated[Any, IgnoredValues()] = None
    request_id: Annotated[Any, IgnoredValues()] = None
    return_mm_kwargs: Annotated[Any, IgnoredValues(True)] = None
    skip_special_tokens: Annotated[Any, IgnoredValues(True)] = None
    top_logprobs: Annotated[Any, IgnoredValues(0)] = None
    truncation: Annotated[Any, IgnoredValues("disabled")] = None
    vllm_xargs: Annotated[Any, IgnoredValues({})] = None
    watermarking: Annotated[Any, IgnoredValues(False)] = None

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        fields = self._tool_fields()
        left_out = [tool.type for tool in self.tools or () if isinstance(tool, LeftOutTool)]
        check_tool_choice(fields["tools"] or (), fields["tool_choice"], left_out)
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model may be told of."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat completion.

        It begins with one system message at the most: many chat templates refuse a second one.
        """
        items = (
            [InputMessage(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        leading = _leading_instructions(items)
        turns = group_calls_into_turns(
            [
                item if isinstance(item, FunctionCallItem | EchoedReasoning) else item.as_chat()
                for item in items[len(leading) :]
            ]
        )
        texts = leading if self.instructions is None else [self.instructions, *leading]
        if texts:
            turns = [ChatMessage(role="system", content="\n\n".join(texts)), *turns]
        return _ChatOfResponse(
            model=self.model,
            messages=[*turns],
            **self._tool_fields(),
            max_tokens=self.max_output_tokens,
            response_format=None if self.text is None else self.text.as_chat(),
            structured_outputs=self.structured_outputs,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            cache_salt=self.cache_salt,
            priority=self.priority,
            **self.sampling_fields(),
        )

    def _tool_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        return {
            "tools": [tool.as_chat() for tool in self.functions] or None,
            "tool_choice": choice
            if choice is None or isinstance(choice, str)
            else choice.as_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
