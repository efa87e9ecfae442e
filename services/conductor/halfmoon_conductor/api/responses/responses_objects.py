"""Define the response objects of OpenAI's Responses API."""

from typing import Any, Literal

from pydantic import BaseModel

from halfmoon_conductor.api.openai.openai_objects import PromptTokensDetails

ResponseStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """A part of the answer's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    """The model's message."""

    type: Literal["message"]
    id: str
    status: ResponseStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(BaseModel):
    """What the model thought before its answer; it is not summarised."""

    type: Literal["reasoning"]
    id: str
    status: ResponseStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None


class FunctionCall(BaseModel):
    """A call by the model; its arguments are the text of a JSON object."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ResponseStatus


OutputItem = ReasoningItem | OutputMessage | FunctionCall


class IncompleteDetails(BaseModel):
    """The reason why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class OutputTokensDetails(BaseModel):
    """Output tokens by kind."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """The cost of a response in tokens."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """The response, which repeats the request's fields."""

    id: str
    object: Literal["response"]
    background: bool
    created_at: int
    status: ResponseStatus
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class DeletedResponse(BaseModel):
    """The answer to a request to remove a stored response."""

    id: str
    object: Literal["response"]
    deleted: bool
