"""Define the bodies of error responses, in OpenAI's and in Anthropic's shape."""

from typing import Literal

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success, whatever its status."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """What went wrong, in Anthropic's words for it."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer below /v1/messages that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorBody
