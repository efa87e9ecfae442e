"""An answer in the shapes of Anthropic's Messages API: whole, or as its named events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel

from halfmoon_conductor import error_responses, sse
from halfmoon_conductor.answering import Answer, Piece

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class AnthropicUsage(BaseModel):
    """What a message cost; `input_tokens` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class ContentBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"]
    text: str


class AnthropicMessage(BaseModel):
    """The model's turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    """Tokens of a conversation."""

    input_tokens: int


class MessagesShape:
    """Writes one answer.

    Args:
        model: its name as the client wrote it.
    """

    def __init__(self, answer: Answer, model: str) -> None:
        self.answer = answer
        self.model = model

    async def whole(self) -> AnthropicMessage:
        """All of it, once it is complete."""
        texts: list[str] = []
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                last = piece
        reason, sequence = _stop_of(last)
        return self._message([ContentBlock(type="text", text="".join(texts))], reason, sequence)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first is there as soon as the first token is."""
        last: Piece | None = None
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                if last is None:
                    message = self._message([], None, None).model_dump()
                    yield _event("message_start", message=message)
                    block = {"type": "text", "text": ""}
                    yield _event("content_block_start", index=0, content_block=block)
                    yield _event("ping")
                last = piece
                if piece.text:
                    delta = {"type": "text_delta", "text": piece.text}
                    yield _event("content_block_delta", index=0, delta=delta)
        assert last is not None, "an answer has a piece"
        reason, sequence = _stop_of(last)
        yield _event("content_block_stop", index=0)
        yield _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=self._usage().model_dump(),
        )
        yield _event("message_stop")

    def _message(
        self, content: list[ContentBlock], reason: StopReason | None, sequence: str | None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=f"msg_{self.answer.order.id.rpartition('-')[2]}",
            type="message",
            role="assistant",
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _usage(self) -> AnthropicUsage:
        n_cached = self.answer.n_cached
        return AnthropicUsage(
            input_tokens=self.answer.order.n_prompt - n_cached,
            output_tokens=self.answer.n_generated,
            cache_read_input_tokens=n_cached,
            cache_creation_input_tokens=0,
        )


def error_event(error: Exception) -> bytes:
    """The last event of a stream that began and could not be finished."""
    body = error_responses.anthropic_body(error_responses.told_in_stream(error))
    return sse.named_event("error", body.model_dump_json())


def _stop_of(last: Piece) -> tuple[StopReason, str | None]:
    if last.stop_string is not None:
        return "stop_sequence", last.stop_string
    return ("max_tokens" if last.finish == "length" else "end_turn"), None


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named_event(kind, sse.json_of({"type": kind, **fields}))
