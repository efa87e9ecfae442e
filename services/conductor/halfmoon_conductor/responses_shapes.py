"""An answer in the shapes of OpenAI's Responses API: whole, or as its typed events."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel

from halfmoon_conductor import error_responses, sse
from halfmoon_conductor.answering import Answer
from halfmoon_conductor.generation import Finish
from halfmoon_conductor.openai_responses import PromptTokensDetails
from halfmoon_conductor.responses_requests import ResponsesRequest, TextConfig

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """A part of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    """The model's turn."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why the answer ends where it does."""

    reason: Literal["max_output_tokens"]


class OutputTokensDetails(BaseModel):
    """Of what kind the tokens are."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """What a response cost, in tokens."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """The answer, with what was asked."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class ResponsesShape:
    """Writes one answer.

    Args:
        body: what the client asked for.
    """

    def __init__(self, answer: Answer, body: ResponsesRequest) -> None:
        self.answer = answer
        self._body = body
        name = answer.order.id.rpartition("-")[2]
        self._id, self._message_id = f"resp_{name}", f"msg_{name}"
        self._sequence = itertools.count()

    async def whole(self) -> ResponseObject:
        """All of it, once it is complete."""
        texts: list[str] = []
        finish: Finish = ""
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                finish = piece.finish
        return self._response(_status_of(finish), "".join(texts))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first is there as soon as the first token is."""
        texts: list[str] = []
        finish: Finish = ""
        begun = False
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    for event in self._opening(place):
                        yield event
                texts.append(piece.text)
                finish = piece.finish
                if piece.text:
                    yield self._event(
                        "response.output_text.delta", **place, delta=piece.text, logprobs=[]
                    )
        text, status = "".join(texts), _status_of(finish)
        item = self._message(status, text)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        part = item.content[0].model_dump()
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item.model_dump())
        response = self._response(status, text).model_dump()
        yield self._event(f"response.{status}", response=response)

    def error_event(self, error: Exception) -> bytes:
        """The last event of a stream that began and could not be finished."""
        told = error_responses.told_in_stream(error)
        return self._event(
            "error",
            code=told.code or told.kind,
            message=told.message,
            param=told.param,
            # Clients look for this in any event before they look at its type.
            error=error_responses.openai_body(told).error.model_dump(),
        )

    def _opening(self, place: dict[str, Any]) -> list[bytes]:
        response = self._response("in_progress", None).model_dump()
        part = OutputText(type="output_text", text="", annotations=[], logprobs=[]).model_dump()
        item = self._message("in_progress", None).model_dump()
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=part),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": next(self._sequence), **fields}
        return sse.named_event(kind, sse.json_of(data))

    def _message(self, status: Status, text: str | None) -> OutputMessage:
        content = (
            []
            if text is None
            else [OutputText(type="output_text", text=text, annotations=[], logprobs=[])]
        )
        return OutputMessage(
            type="message", id=self._message_id, status=status, role="assistant", content=content
        )

    def _response(self, status: Status, text: str | None) -> ResponseObject:
        """With a text, it is over; without one it has just begun."""
        body = self._body
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self.answer.created,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata={},
            model=body.model,
            output=[] if text is None else [self._message(status, text)],
            parallel_tool_calls=False,
            previous_response_id=None,
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=_text_config(body.text),
            tool_choice="none",
            tools=[],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if text is None else self._usage(),
            user=body.user,
        )

    def _usage(self) -> ResponsesUsage:
        n_prompt, n_generated = self.answer.order.n_prompt, self.answer.n_generated
        return ResponsesUsage(
            input_tokens=n_prompt,
            input_tokens_details=PromptTokensDetails(cached_tokens=self.answer.n_cached),
            output_tokens=n_generated,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=n_prompt + n_generated,
        )


def _text_config(asked: TextConfig | None) -> dict[str, Any]:
    told = asked.model_dump(by_alias=True, exclude_none=True) if asked else {}
    return {"format": {"type": "text"}, **told}


def _status_of(finish: Finish) -> Status:
    return "incomplete" if finish == "length" else "completed"
