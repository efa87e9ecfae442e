"""What clients are answered: OpenAI's shapes.

Fields that OpenAI sends as null are null here, and those that it leaves out are left out
(`model_dump_json(exclude_unset=True)`).
"""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Where the prompt's KV came from."""

    cached_tokens: int


class CompletionUsage(BaseModel):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """How likely the tokens of a text were, place by place."""

    tokens: list[str]
    #: null for a prompt's first token, which nothing comes before.
    token_logprobs: list[float | None]
    #: The likeliest tokens at that place, and the one that is there.
    top_logprobs: list[dict[str, float] | None]
    #: Where each token's text begins, in characters.
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """One candidate for a place in a prompt; vLLM's addition."""

    logprob: float
    rank: int
    decoded_token: str


#: Place by place: candidates by token id; null for the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """The text that was generated."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    #: vLLM's addition: the stop string, or the token of `stop_token_ids`, that ended the text.
    stop_reason: int | str | None = None
    #: vLLM's additions, there for those who ask.
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunkChoice(BaseModel):
    """A piece of the text; the last piece says why it is the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    #: vLLM's addition, with the last piece.
    stop_reason: int | str | None = None
    #: vLLM's additions: the prompt's with a choice's first piece.
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(BaseModel):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | None = None


class TopLogprob(BaseModel):
    """A candidate for a place in an answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token at a place, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """How likely the tokens of an answer were."""

    content: list[TokenLogprob]
    refusal: None


class ToolFunction(BaseModel):
    """What is called; the arguments are a JSON object's text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of a tool."""

    #: In a stream: which of the answer's calls.
    index: int | None = None
    id: str
    type: Literal["function"]
    function: ToolFunction


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    #: null when it only calls.
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """The turn that was generated."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    #: vLLM's additions.
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer to a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    #: vLLM's additions, there for those who ask.
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """A piece of the turn: the role first, then texts, nothing at the end."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    #: Each call comes whole.
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """What this event adds to the turn."""

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
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    #: vLLM's addition, with the first chunk.
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    #: vLLM's addition.
    max_model_len: int


class ModelList(BaseModel):
    """The models that are served: one, or none while no worker has joined."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Whether requests can be served, and if not, who is missing."""

    ready: bool
    missing: list[str]
