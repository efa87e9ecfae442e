"""What clients may ask, field by field: OpenAI's shapes, with the additions that vLLM made.

A field is *supported*; or *neutral*: known, taken with the values that ask for nothing and
refused, by name, with any other; or unknown and refused. So nothing that a client asks for
is ignored in silence. Constraints written here are the ones in ``/openapi.json``.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOKEN_ID = 2**32 - 1


class Neutral:
    """Marks a known field that asks for nothing: left out, null, or one of these values."""

    def __init__(self, *values: Any) -> None:
        self._allowed = (None, *values)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Any value, then our own look at it."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The values that are taken."""
        return {"enum": list(self._allowed)}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in self._allowed):
            return value
        ways_out = " or ".join(json.dumps(each) for each in self._allowed[1:] or [None])
        raise PydanticCustomError(
            "not_supported",
            "is not supported yet; leave it out or send {value}",
            {"value": ways_out},
        )


def one_of(message: str, kind: Callable[[Any], str | None]) -> Discriminator:
    """Tells the forms of a field apart, so that an error speaks of the form that was meant."""
    return Discriminator(kind, custom_error_type="wrong_type", custom_error_message=message)


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list | tuple) else None


def _prompt_form(value: Any) -> str | None:
    match value:
        case str():
            return "text"
        case [str(), *_]:
            return "texts"
        case [list(), *_]:
            return "token lists"
        case [*_]:
            return "tokens"
    return None


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "not_unicode", "has half of a surrogate pair in it, which is no character"
        ) from None
    return text


def _single(prompts: list[Any]) -> list[Any]:
    if len(prompts) == 1:
        return prompts
    raise PydanticCustomError(
        "not_supported",
        "has {n} prompts; several in one request are not supported yet, send one request for each",
        {"n": len(prompts)},
    )


Text = Annotated[str, AfterValidator(_unicode)]
Single = (AfterValidator(_single), Field(json_schema_extra={"minItems": 1, "maxItems": 1}))
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Salt = Annotated[str, Field(max_length=1024), AfterValidator(_unicode)]
StopString = Annotated[
    str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), AfterValidator(_unicode)
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("list")],
    one_of("must be a string or a list of strings", _text_or_list),
]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[Text], *Single, Tag("texts")]
    | Annotated[list[TokenIds], *Single, Tag("token lists")],
    one_of("must be a string or a list of token ids", _prompt_form),
]


class Shape(BaseModel):
    """What all of a request's objects have in common: exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        return _refuse_unknown(cls, body)


def _refuse_unknown(shape: type[BaseModel], body: Any) -> Any:
    """One error for the first unknown field, where pydantic would make one for each."""
    if isinstance(body, dict):
        for name in body:
            if name not in shape.model_fields:
                # A name with half of a surrogate pair could not be told.
                told = name.encode(errors="replace").decode()
                raise PydanticCustomError("unknown_field", "{field}", {"field": told})
    return body


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
        return _refuse_unknown(cls, body)


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("list")],
    one_of("must be a string or a list of text parts", _text_or_list),
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
