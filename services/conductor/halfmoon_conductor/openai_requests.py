"""What clients may ask: OpenAI's shapes, field by field, with the additions that vLLM made.

Of what kinds fields are, and what becomes of those that are not supported: `request_fields`.
"""

import json
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, JsonValue, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from halfmoon_conductor.request_fields import (
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    Neutral,
    Prompt,
    Salt,
    Shape,
    Stop,
    Text,
    TokenId,
    one_of,
    refuse_unknown,
    text_or_list,
)


class StreamOptions(Shape):
    """What a stream says besides the text."""

    include_usage: bool | None = Field(
        None, description="End with a chunk that has no choices, and the usage."
    )


class SharedFields(Shape):
    """What completions and chat completions have in common."""

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKEN_ID, description="The newer name of max_tokens."
    )
    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="Default 1. 0 is greedy."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default 1.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_TOKEN_ID, description="Keep so many likeliest tokens; 0 or -1: all."
    )
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Left out: another one for each request."
    )
    stop: Stop | None = Field(
        None, description="The text ends before the first of these that it would say."
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True
    )
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="Nothing stops the answer before so many tokens."
    )
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-text token.")
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = Field(
        None, description="Share cached prefixes only with the same salt."
    )
    ttft_slo_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds to the first token, at the most."
    )
    tbt_slo_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds between tokens, at the most."
    )
    user: Text | None = Field(None, description="A label of the client's; changes nothing.")
    safety_identifier: Text | None = Field(None, description="A label; changes nothing.")
    prompt_cache_key: Text | None = Field(
        None, description="Taken and not needed: equal prefixes find their cache by themselves."
    )

    n: Annotated[Any, Neutral(1)] = None
    logit_bias: Annotated[Any, Neutral({})] = None
    metadata: Annotated[Any, Neutral({})] = None
    prompt_logprobs: Annotated[Any, Neutral()] = None
    truncate_prompt_tokens: Annotated[Any, Neutral()] = None
    use_beam_search: Annotated[Any, Neutral(False)] = None
    length_penalty: Annotated[Any, Neutral(1, 1.0)] = None
    skip_special_tokens: Annotated[Any, Neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    include_stop_str_in_output: Annotated[Any, Neutral(False)] = None
    bad_words: Annotated[Any, Neutral([])] = None
    allowed_token_ids: Annotated[Any, Neutral()] = None
    structured_outputs: Annotated[Any, Neutral()] = None
    guided_json: Annotated[Any, Neutral()] = None
    guided_regex: Annotated[Any, Neutral()] = None
    guided_choice: Annotated[Any, Neutral()] = None
    guided_grammar: Annotated[Any, Neutral()] = None
    priority: Annotated[Any, Neutral(0)] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "contradiction", "max_tokens and max_completion_tokens differ; send one of them"
            )
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "contradiction", "stream_options is only for requests with stream: true"
            )
        if self.n_new_tokens is not None and (self.min_tokens or 0) > self.n_new_tokens:
            raise PydanticCustomError("contradiction", "min_tokens is greater than max_tokens")
        return self

    @property
    def n_new_tokens(self) -> int | None:
        """New tokens asked for at the most, under either name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(SharedFields):
    """Go on with a text."""

    prompt: Prompt = Field(
        description="One text, or one list of token ids; a list of one of these is fine too."
    )
    add_special_tokens: bool | None = Field(
        None, description="Default true: begin with the BOS token if the model wants one."
    )

    best_of: Annotated[Any, Neutral(1)] = None
    echo: Annotated[Any, Neutral(False)] = None
    logprobs: Annotated[Any, Neutral()] = None
    suffix: Annotated[Any, Neutral("")] = None

    @property
    def sole_prompt(self) -> str | list[int]:
        """The text, or the token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return cast(list[int], self.prompt) if isinstance(first, int) else first


def _only_text(kind: Any) -> Any:
    if kind == "text":
        return kind
    raise PydanticCustomError(
        "not_supported",
        'is {kind}, which is not supported; only parts of type "text" are',
        {"kind": json.dumps(kind)[:100]},
    )


class TextPart(Shape):
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
        # What is wrong with an image is its type, and not that its fields are unknown.
        if isinstance(body, dict) and body.get("type", "text") != "text":
            return {"type": body["type"], "text": ""}
        return refuse_unknown(cls, body)


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("list")],
    one_of("must be a string or a list of text parts", text_or_list),
]


class ChatMessage(Shape):
    """One turn. An assistant's may be handed back just as it was answered."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is another name for system."
    )
    content: Content
    name: Text | None = None

    refusal: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral([])] = None
    audio: Annotated[Any, Neutral()] = None
    tool_calls: Annotated[Any, Neutral([])] = None
    tool_call_id: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates read it: one text, its parts on lines of their own."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
        }
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(SharedFields):
    """Answer a conversation."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    add_generation_prompt: bool | None = Field(
        None, description="Default true: let the model begin a turn of its own."
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="More names for the model's chat template, such as enable_thinking."
    )

    logprobs: Annotated[Any, Neutral(False)] = None
    top_logprobs: Annotated[Any, Neutral(0)] = None
    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Neutral(True, False)] = None
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none")] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    reasoning_effort: Annotated[Any, Neutral()] = None
    verbosity: Annotated[Any, Neutral()] = None
    service_tier: Annotated[Any, Neutral("auto", "default")] = None
    store: Annotated[Any, Neutral(False)] = None
    web_search_options: Annotated[Any, Neutral()] = None
    documents: Annotated[Any, Neutral()] = None
    chat_template: Annotated[Any, Neutral()] = None
    continue_final_message: Annotated[Any, Neutral(False)] = None
    echo: Annotated[Any, Neutral(False)] = None
