"""Define requests of Anthropic's Messages API, as far as they are text."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.anthropic.anthropic_tools import (
    AnthropicTool,
    AnthropicToolChoice,
    AnthropicTools,
    AnthropicTurn,
    Blocks,
    ServerTool,
    join_text_blocks,
)
from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.label_fields import Word
from halfmoon_conductor.api.openai.chat_messages import ChatMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.api.request_fields import (
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID,
    MAX_TURNS,
    MAX_VARIABLES,
    ApiModel,
    IgnoredValues,
    Salt,
    StopString,
    Text,
    Variables,
)
from halfmoon_conductor.api.structured_fields import JsonSchema, Schema, SchemaFormat
from halfmoon_conductor.api.tool_fields import check_tool_choice

_MAX_EDITS = 16


class AnthropicMetadata(ApiModel):
    """Labels of the request."""

    user_id: Text | None = Field(None, description="A label; changes nothing.")


class ThinkingConfig(ApiModel):
    """Whether the model thinks before it answers, where its template has a switch for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKEN_ID, description="Changes nothing: max_tokens is the limit."
    )
    display: Word | None = Field(None, description="Changes nothing: thoughts are shown.")


class OutputFormat(ApiModel):
    """The answer is JSON that matches a schema."""

    type: Literal["json_schema"]
    # pydantic's models already use the name `schema`.
    schema_: Schema = Field(alias="schema")

    def as_chat(self) -> SchemaFormat:
        """Return the same as chat completions ask for it."""
        schema = JsonSchema(name="output", schema=self.schema_)
        return SchemaFormat(type="json_schema", json_schema=schema)


class OutputConfig(ApiModel):
    """How much the model thinks, and what its answer must be."""

    effort: Word | None = Field(None, description="As reasoning_effort of chats.")
    format: OutputFormat | None = Field(None, description="As response_format of chats.")
    task_budget: Annotated[Any, IgnoredValues()] = None


def _only_clearing(kind: str) -> str:
    if kind.startswith("clear_"):
        return kind
    raise PydanticCustomError(
        "not_supported", "is not supported with {kind}; edits that clear are", {"kind": kind}
    )


class ContextEdit(ApiModel):
    """An edit that spares a long conversation some of its text; none is made here."""

    type: Annotated[Word, AfterValidator(_only_clearing)]
    keep: JsonValue = None
    trigger: JsonValue = None
    clear_at_least: JsonValue = None
    exclude_tools: JsonValue = None
    clear_tool_inputs: JsonValue = None


class ContextManagement(ApiModel):
    """What may be cleared of a conversation; all of it is kept."""

    edits: list[ContextEdit] | None = Field(None, max_length=_MAX_EDITS, fail_fast=True)


class _ChatOfMessages(ChatRequest):
    """A chat that was sent as a request of this API."""

    format_field: ClassVar[str] = "output_config"


class CountTokensRequest(ApiModel):
    """A conversation whose tokens are to be counted."""

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    messages: list[AnthropicTurn] = Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)
    system: Blocks | None = None
    chat_template_kwargs: Variables | None = Field(
        None, description="vLLM's: more names for the model's chat template."
    )

    tools: AnthropicTools | None = Field(None, description="What the model may call.")
    tool_choice: AnthropicToolChoice | None = Field(None, description="Default auto.")

    thinking: ThinkingConfig | None = Field(
        None, description="Whether to think, for templates that read enable_thinking."
    )
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = Field(
        None, description="Changes nothing: nothing is cleared here."
    )

    mcp_servers: Annotated[Any, IgnoredValues([])] = None
    cache_control: Annotated[Any, IgnoredValues()] = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> "CountTokensRequest":
        if self.messages[-1].role != "user":
            raise contradiction(
                "messages",
                "the last message must be the user's; going on with one of the assistant's is not "
                "supported",
            )
        return self

    @model_validator(mode="after")
    def _can_be_called(self) -> "CountTokensRequest":
        if (n := sum(len(turn.as_chat()) for turn in self.messages)) > MAX_TURNS:
            raise contradiction(
                "messages",
                "the results of calls and the turns are {n} in all, over the {most} that one "
                "request may have",
                n=n,
                most=MAX_TURNS,
            )
        fields = self._tool_fields()
        left_out = [tool.name for tool in self.tools or () if isinstance(tool, ServerTool)]
        check_tool_choice(fields["tools"] or (), fields["tool_choice"], left_out)
        return self

    def as_chat(self) -> ChatRequest:
        """Return the conversation as a chat, the system message first."""
        return ChatRequest(**self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        messages = [message for turn in self.messages for message in turn.as_chat()]
        if self.system is not None:
            messages.insert(0, ChatMessage(role="system", content=join_text_blocks(self.system)))
        return {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": self._template_variables(),
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            **self._tool_fields(),
        }

    def _template_variables(self) -> dict[str, Any] | None:
        given = self.chat_template_kwargs or {}
        if self.thinking is None or self.thinking.type == "adaptive" or len(given) >= MAX_VARIABLES:
            return self.chat_template_kwargs
        return {"enable_thinking": self.thinking.type == "enabled", **given}

    def _tool_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        own = [tool.as_chat() for tool in self.tools or () if isinstance(tool, AnthropicTool)]
        return {
            "tools": own or None,
            "tool_choice": None if choice is None else choice.as_chat(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }


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
    metadata: AnthropicMetadata | None = None
    cache_salt: Salt | None = Field(
        None, description="Halfmoon's own: share cached prefixes only with the same salt."
    )

    service_tier: Annotated[Any, IgnoredValues("auto", "standard_only")] = None
    container: Annotated[Any, IgnoredValues()] = None
    inference_geo: Annotated[Any, IgnoredValues()] = None
    ec_transfer_params: Annotated[Any, IgnoredValues()] = None
    kv_transfer_params: Annotated[Any, IgnoredValues()] = None
    mm_payload: Annotated[Any, IgnoredValues("tensors")] = None
    return_mm_kwargs: Annotated[Any, IgnoredValues(True)] = None
    vllm_xargs: Annotated[Any, IgnoredValues({})] = None
    watermarking: Annotated[Any, IgnoredValues(False)] = None

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat completion."""
        config = self.output_config
        return _ChatOfMessages(
            **self._chat_fields(),
            response_format=config.format.as_chat() if config and config.format else None,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            cache_salt=self.cache_salt,
        )
