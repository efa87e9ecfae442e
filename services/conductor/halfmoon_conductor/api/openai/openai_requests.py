"""What clients may ask: OpenAI's shapes, field by field, with the additions that vLLM made.

Of what kinds fields are, and what becomes of those that are not supported: `request_fields`.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.label_fields import Label, Metadata, Options, Word
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOKEN_ID,
    ApiModel,
    IgnoredValues,
    Parts,
    Prompt,
    Salt,
    Text,
    Variables,
    form_discriminator,
    reject_unknown_fields,
    text_or_list_form,
)
from halfmoon_conductor.api.sampling_fields import SamplingFields
from halfmoon_conductor.api.structured_fields import (
    Choices,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    grammar_of_fields,
)
from halfmoon_conductor.api.tool_fields import (
    CalledTool,
    Tool,
    ToolChoice,
    Tools,
    check_tool_choice,
)
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_protocol.sampling import MAX_TOP_LOGPROBS


class StreamOptions(ApiModel):
    """What a stream says besides the text."""

    include_usage: bool | None = Field(
        None, description="End with a chunk that has no choices, and the usage."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Changes nothing: there is none.")


class SharedFields(SamplingFields):
    """What completions and chat completions have in common."""

    #: What a client calls `response_format`, for errors about it.
    format_field: ClassVar[str] = "response_format"

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="0 is only for completions with echo."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKEN_ID, description="The newer name of max_tokens."
    )
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="Nothing stops the answer before so many tokens."
    )
    n: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Answers to each prompt, drawn independently."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Log probabilities of the prompt's tokens and of so many likeliest ones.",
    )
    return_token_ids: bool | None = Field(
        None, description="Give the ids of prompt and answer beside the text."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens as token_id:7 in log probabilities."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31, description="Lower goes first among requests that wait."
    )
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
    user: Label | None = Field(None, description="A label of the client's; changes nothing.")
    safety_identifier: Label | None = Field(None, description="A label; changes nothing.")
    prompt_cache_key: Label | None = Field(
        None, description="Taken and not needed: equal prefixes find their cache by themselves."
    )
    prompt_cache_retention: Word | None = Field(None, description="Taken and not needed.")
    prompt_cache_options: Options | None = Field(None, description="Taken and not needed.")
    metadata: Metadata | None = Field(None, description="Labels; nothing is stored.")
    store: bool | None = Field(None, description="Changes nothing: nothing is stored.")
    service_tier: Word | None = Field(None, description="Changes nothing: there is one tier.")
    chat_id: Label | None = Field(None, description="A label; changes nothing.")

    response_format: ResponseFormat | None = Field(
        None, description="What the answer must be: any text, a JSON object, JSON of a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The same in vLLM's words: json, regex, choice, grammar, json_object."
    )
    guided_json: SchemaOrText | None = Field(None, description="vLLM's older name of json there.")
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    session_id: Label | None = Field(None, description="A label; changes nothing.")

    truncate_prompt_tokens: Annotated[Any, IgnoredValues()] = None
    truncation_side: Annotated[Any, IgnoredValues()] = None
    logprob_token_ids: Annotated[Any, IgnoredValues()] = None
    watermarking: Annotated[Any, IgnoredValues(False)] = None
    thinking_token_budget: Annotated[Any, IgnoredValues()] = None
    repetition_detection: Annotated[Any, IgnoredValues()] = None
    request_id: Annotated[Any, IgnoredValues()] = None
    routed_experts_prompt_start: Annotated[Any, IgnoredValues(0)] = None
    return_token_offsets: Annotated[Any, IgnoredValues(False)] = None
    return_mm_kwargs: Annotated[Any, IgnoredValues(True)] = None
    mm_payload: Annotated[Any, IgnoredValues("tensors")] = None
    kv_transfer_params: Annotated[Any, IgnoredValues()] = None
    ec_transfer_params: Annotated[Any, IgnoredValues()] = None
    vllm_xargs: Annotated[Any, IgnoredValues({})] = None
    stream_interval: Annotated[Any, IgnoredValues(1)] = None
    use_beam_search: Annotated[Any, IgnoredValues(False)] = None
    length_penalty: Annotated[Any, IgnoredValues(1, 1.0)] = None
    skip_special_tokens: Annotated[Any, IgnoredValues(True)] = None
    spaces_between_special_tokens: Annotated[Any, IgnoredValues(True)] = None
    include_stop_str_in_output: Annotated[Any, IgnoredValues(False)] = None
    bad_words: Annotated[Any, IgnoredValues([])] = None
    allowed_token_ids: Annotated[Any, IgnoredValues()] = None

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
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "contradiction", "prompt_logprobs can't be streamed; leave out stream: true"
            )
        if self.n_new_tokens is not None and (self.min_tokens or 0) > self.n_new_tokens:
            raise PydanticCustomError("contradiction", "min_tokens is greater than max_tokens")
        return self

    @property
    def n_new_tokens(self) -> int | None:
        """New tokens asked for at the most, under either name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def constrains(self) -> bool:
        """Whether a field may say what the answer must be; what it says is `wanted`."""
        fields = (
            *(self.response_format, self.structured_outputs, self.guided_json),
            *(self.guided_regex, self.guided_choice, self.guided_grammar),
        )
        return any(field is not None for field in fields)

    def wanted(self) -> RequestedGrammar | None:
        """What the answer must be, if anything.

        Raises:
            InvalidRequest: what was asked for can't be had; the text says which field and why.
        """
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        wanted = grammar_of_fields(
            self.response_format, self.structured_outputs, guided, format_field=self.format_field
        )
        if wanted is not None:
            self.check_ending(wanted.param)
        return wanted

    def check_ending(self, param: str) -> None:
        """That an answer may end when what the field `param` asks for is complete.

        Raises:
            InvalidRequest: it may not.
        """
        if self.ignore_eos or self.min_tokens:
            raise InvalidRequest(
                f"{param} ends the answer when it is complete; leave out ignore_eos and "
                "min_tokens.",
                param="ignore_eos" if self.ignore_eos else "min_tokens",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    @property
    def n_top(self) -> int | None:
        """Likeliest tokens to report beside each new one; None: no log probabilities."""
        raise NotImplementedError

    @property
    def n_prompt_top(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs


class CompletionRequest(SharedFields):
    """Go on with a text."""

    prompt: Prompt = Field(
        description="A text or a list of token ids, or a list of several of one of these."
    )
    add_special_tokens: bool | None = Field(
        None, description="Default true: begin with the BOS token if the model wants one."
    )

    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Log probabilities of the answer's tokens (with echo, the prompt's too), and "
        "of so many likeliest ones at each place.",
    )

    best_of: Annotated[Any, IgnoredValues(1)] = None
    suffix: Annotated[Any, IgnoredValues("")] = None
    prompt_embeds: Annotated[Any, IgnoredValues()] = None

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.n_new_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "contradiction", "max_tokens is 0, which is only for echo: true; ask for 1 or more"
            )
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise PydanticCustomError(
                "contradiction",
                "prompts times n is {n}, over the {most} answers that one request may have",
                {"n": len(self.prompts) * (self.n or 1), "most": MAX_CHOICES},
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All of them, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def n_characters(self) -> int:
        """Of the prompts that are texts: what there is to tokenise."""
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    @property
    def n_top(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs

    @property
    def n_prompt_top(self) -> int | None:
        """As asked for, or because the echo has log probabilities too."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


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
        # What is wrong with an image is its type, and not that its fields are unknown.
        if isinstance(body, dict) and body.get("type", "text") != "text":
            return {"type": body["type"], "text": ""}
        return reject_unknown_fields(cls, body)


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Parts, Tag("list")],
    form_discriminator("must be a string or a list of text parts", text_or_list_form),
]


class Prediction(ApiModel):
    """What the client thinks that the answer will be, mostly."""

    type: Literal["content"]
    content: Content


class ChatMessage(ApiModel):
    """One turn. An assistant's may be handed back just as it was answered."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is another name for system; tool says what a call gave."
    )
    content: Content
    name: Text | None = None
    tool_call_id: Text | None = Field(None, description="Of role tool: whose result this is.")

    refusal: Annotated[Any, IgnoredValues()] = None
    annotations: Annotated[Any, IgnoredValues([])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    tool_calls: Annotated[Any, IgnoredValues([])] = None
    function_call: Annotated[Any, IgnoredValues()] = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: one text, its parts on lines of their own."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": _text_of(self.content),
        }
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message if self.name is None else message | {"name": self.name}

    @property
    def n_characters(self) -> int:
        """Of its text."""
        return len(_text_of(self.content))


class CallingMessage(ApiModel):
    """An assistant's turn that calls tools, handed back."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: list[CalledTool] = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)

    refusal: Annotated[Any, IgnoredValues()] = None
    annotations: Annotated[Any, IgnoredValues([])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    function_call: Annotated[Any, IgnoredValues()] = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it, calls with their arguments as objects."""
        return {
            "role": self.role,
            "content": "" if self.content is None else _text_of(self.content),
            "tool_calls": [call.for_template() for call in self.tool_calls],
        }

    @property
    def n_characters(self) -> int:
        """Of its text and its calls."""
        return len(_text_of(self.content or "")) + len(str(self.tool_calls))


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _message_form(value: Any) -> str:
    if isinstance(value, dict):
        return "calling" if value.get("tool_calls") else "plain"
    return "calling" if isinstance(value, CallingMessage) else "plain"


AnyMessage = Annotated[
    Annotated[ChatMessage, Tag("plain")] | Annotated[CallingMessage, Tag("calling")],
    Discriminator(_message_form),
]


class ChatRequest(SharedFields):
    """Answer a conversation."""

    messages: list[AnyMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool | None = Field(
        None, description="Default true: let the model begin a turn of its own."
    )
    chat_template_kwargs: Variables | None = Field(
        None, description="More names for the model's chat template, such as enable_thinking."
    )

    logprobs: bool | None = Field(None, description="Log probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With logprobs: so many likeliest tokens at each place.",
    )

    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Default auto.")
    parallel_tool_calls: bool | None = Field(None, description="Default true; false: one call.")
    prediction: Prediction | None = Field(
        None, description="Changes nothing: what an answer may be is not used to hasten it."
    )
    reasoning_effort: Word | None = Field(
        None, description="Given to a chat template that has such a switch; else changes nothing."
    )
    verbosity: Word | None = Field(None, description="Changes nothing: models have no such switch.")

    functions: Annotated[Any, IgnoredValues([])] = None
    function_call: Annotated[Any, IgnoredValues("none")] = None
    modalities: Annotated[Any, IgnoredValues(["text"])] = None
    audio: Annotated[Any, IgnoredValues()] = None
    web_search_options: Annotated[Any, IgnoredValues()] = None
    documents: Annotated[Any, IgnoredValues()] = None
    chat_template: Annotated[Any, IgnoredValues()] = None
    continue_final_message: Annotated[Any, IgnoredValues(False)] = None
    echo: Annotated[Any, IgnoredValues(False)] = None
    add_special_tokens: Annotated[Any, IgnoredValues(False)] = None
    include_reasoning: Annotated[Any, IgnoredValues(True)] = None
    media_io_kwargs: Annotated[Any, IgnoredValues({})] = None
    mm_processor_kwargs: Annotated[Any, IgnoredValues({})] = None
    return_prompt_text: Annotated[Any, IgnoredValues(False)] = None

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.n_new_tokens == 0:
            raise PydanticCustomError("contradiction", "max_tokens is 0; ask for 1 or more")
        check_tool_choice(self.tools or (), self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "contradiction", "top_logprobs is only for requests with logprobs: true"
            )
        return self

    @property
    def n_characters(self) -> int:
        """Of all that the conversation's text is made of, roughly."""
        others = len(str(self.offered or "")) + len(str(self.chat_template_kwargs or ""))
        return others + sum(message.n_characters for message in self.messages)

    @property
    def n_top(self) -> int | None:
        """As `logprobs` and `top_logprobs` say together."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model is to know of."""
        return [] if self.tool_choice == "none" else (self.tools or [])

    @property
    def most_calls(self) -> int:
        """Calls in one answer, at the most."""
        return 1 if self.parallel_tool_calls is False else MAX_CHOICES
