"""Define the fields that completions and chat completions share."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.label_fields import Label, Metadata, Options, Word
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    MAX_TOKEN_ID,
    ApiModel,
    IgnoredValues,
    Salt,
    Text,
)
from halfmoon_conductor.api.sampling_fields import SamplingFields
from halfmoon_conductor.api.structured_fields import (
    Choices,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    grammar_of_fields,
)
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_protocol.sampling import MAX_TOP_LOGPROBS


class StreamOptions(ApiModel):
    """Options of a stream, besides the text."""

    include_usage: bool | None = Field(
        None, description="End with a chunk that has no choices, and the usage."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Changes nothing: there is none.")


class SharedFields(SamplingFields):
    """Fields of both completions and chat completions."""

    #: The client's name of `response_format`, for errors.
    format_field: ClassVar[str] = "response_format"

    model: Text = Field(description="The name of the model served, as /v1/models has it.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="0 is only for completions with echo."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKEN_ID, description="The newer name of max_tokens."
    )
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="No end or stop token is drawn before so many."
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
            raise contradiction(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens differ; send one of them",
            )
        if self.stream_options is not None and not self.stream:
            raise contradiction(
                "stream_options", "stream_options is only for requests with stream: true"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction(
                "prompt_logprobs", "prompt_logprobs can't be streamed; leave out stream: true"
            )
        if self.n_new_tokens is not None and (self.min_tokens or 0) > self.n_new_tokens:
            raise contradiction(
                "min_tokens",
                "min_tokens is {least}, over {limit}, which is {most}; lower it, or raise {limit}",
                least=self.min_tokens,
                limit="max_tokens" if self.max_tokens is not None else "max_completion_tokens",
                most=self.n_new_tokens,
            )
        return self

    @property
    def n_new_tokens(self) -> int | None:
        """Most new tokens that the client asks for, under either name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def n_generated_tokens(self) -> int | None:
        """Most tokens to generate: where none is asked for, one must be generated too."""
        return None if self.n_new_tokens is None else max(self.n_new_tokens, 1)

    @property
    def has_grammar(self) -> bool:
        """True if a field asks for a grammar; see `requested_grammar`."""
        fields = (
            *(self.response_format, self.structured_outputs, self.guided_json),
            *(self.guided_regex, self.guided_choice, self.guided_grammar),
        )
        return any(field is not None for field in fields)

    def requested_grammar(self) -> RequestedGrammar | None:
        """Return the grammar that the answer must match, if any.

        Raises:
            InvalidRequest: a field is not supported; the text names it and the reason.
        """
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        requested = grammar_of_fields(
            self.response_format, self.structured_outputs, guided, format_field=self.format_field
        )
        if requested is not None:
            self.check_ending(requested.param)
        return requested

    def check_ending(self, param: str) -> None:
        """Check that an answer may end when the field `param` is fulfilled.

        Raises:
            InvalidRequest: other fields forbid it.
        """
        if self.ignore_eos:
            raise InvalidRequest(
                f"{param} ends the answer when it is complete; leave out ignore_eos.",
                param="ignore_eos",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """True if every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    @property
    def n_top(self) -> int | None:
        """Number of likeliest tokens to report beside each new one; None: no log probabilities."""
        raise NotImplementedError

    @property
    def n_prompt_top(self) -> int | None:
        """Number of likeliest tokens to report beside each prompt token; None: no scores."""
        return self.prompt_logprobs
