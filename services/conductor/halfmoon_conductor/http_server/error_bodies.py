"""Define the bodies of error responses, in OpenAI's and in Anthropic's shape."""

from typing import Literal

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response with an error status."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's shape."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of every response below /v1/messages with an error status."""

    type: Literal["error"]
    error: AnthropicErrorBody
