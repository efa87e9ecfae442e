"""Define OpenAI's response objects.

Fields that OpenAI sends as null are null here. Fields that OpenAI leaves out are left out
(`model_dump_json(exclude_unset=True)`).
"""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Prompt tokens by the origin of their KV."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """New tokens by what they are."""

    #: Tokens of thoughts and of their markers.
    reasoning_tokens: int


class CompletionUsage(BaseModel):
    """The cost of a request in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    #: Where thoughts are told apart from the answer.
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities of a text's tokens, by position."""

    tokens: list[str]
    #: null for a prompt's first token, which no token precedes.
    token_logprobs: list[float | None]
    #: The likeliest tokens at that position, and the chosen one.
    top_logprobs: list[dict[str, float] | None]
    #: Offset of each token's text, in characters.
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """One candidate for a position in a prompt; vLLM's addition."""

    logprob: float
    rank: int
    decoded_token: str


#: By position: candidates by token id; null for the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    #: vLLM's addition: the stop string, or the token of `stop_token_ids`, that ended the text.
    stop_reason: int | str | None = None
    #: vLLM's additions, set on request.
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """The response to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunkChoice(BaseModel):
    """A piece of the text; the last piece has the finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    #: vLLM's addition, with the last piece.
    stop_reason: int | str | None = None
    #: vLLM's additions; the prompt's ids come with a choice's first piece.
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(BaseModel):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | None = None


class TopLogprob(BaseModel):
    """A candidate for a position in an answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token at a position, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ToolFunction(BaseModel):
    """A called function; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One tool call."""

    #: In a stream: the index of the call in the answer.
    index: int | None = None
    id: str
    type: Literal["function"]
    function: ToolFunction


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    #: null when the message has only calls, or only thoughts.
    content: str | None
    refusal: None
    #: What the model thought before; vLLM's and DeepSeek's addition.
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One generated message."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    #: vLLM's additions.
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The response to a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: CompletionUsage
    #: vLLM's additions, set on request.
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """A piece of the message: the role first, then texts, nothing at the end."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    #: A piece of what the model thinks before it answers.
    reasoning_content: str | None = None
    #: Each call comes whole.
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """The part that this event adds to a message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    #: vLLM's additions.
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    #: vLLM's addition, with the first chunk.
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    #: vLLM's addition.
    max_model_len: int
    #: Our addition: defaults of sampling fields that the model's makers state; others are OpenAI's.
    default_sampling_params: dict[str, float]


class ModelList(BaseModel):
    """The served models: one, or none before the cluster has been ready."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """The conductor's readiness for requests, and the roles without a worker."""

    ready: bool
    missing: list[str]
    #: Why roles are missing, where that is known, with the way out.
    reason: str = ""
