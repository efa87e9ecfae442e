"""Write an answer in the shapes of OpenAI's Responses API, whole or as typed events."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.answer_stream import AnswerPart, AnswerStream, join_adjacent
from halfmoon_conductor.api.openai.openai_objects import PromptTokensDetails
from halfmoon_conductor.api.responses.output_items import OutputItems
from halfmoon_conductor.api.responses.responses_objects import (
    IncompleteDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseObject,
    ResponseStatus,
    ResponsesUsage,
)
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest, TextConfig
from halfmoon_conductor.engine_io.gateway_interface import Finish
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server import error_responses

#: Fields of each function that an answer repeats.
_REPEATED_FIELDS = {"type", "name", "description", "parameters", "strict"}


class ResponsesSerializer:
    """Write one answer, whole or as server-sent events.

    Args:
        body: the client's request.
        save: stores the finished response, and returns whether it did.
        stores: whether responses are stored, unless the request says otherwise.
    """

    #: Texts are quickly written.
    is_long = False

    def __init__(
        self,
        output: OutputProcessor,
        body: ResponsesRequest,
        save: Callable[[ResponseObject], Awaitable[bool]],
        *,
        stores: bool,
    ) -> None:
        self._save = save
        self._stores = stores and body.store is not False
        self.output = output
        self._body = body
        self._name = output.request.id.rpartition("-")[2]
        self._id = f"resp_{self._name}"
        self._parts = AnswerStream(output.request)
        self._sequence = itertools.count()

    async def whole(self) -> ResponseObject:
        """Return the whole response once it is complete."""
        parts: list[AnswerPart] = []
        finish: Finish = ""
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                parts += self._parts.feed(piece)
                finish = piece.finish
        items = OutputItems(self._name, _no_event)
        for part in join_adjacent(parts):
            for _ in items.add(part):
                pass
        status = self._status_of(finish)
        for _ in items.end(status):
            pass
        return await self._saved(self._response(status, items.done))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; the first as soon as the first token exists."""
        finish: Finish = ""
        started = False
        items = OutputItems(self._name, self._event)
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                if not started:
                    started = True
                    response = self._response("in_progress", None).model_dump()
                    yield self._event("response.created", response=response)
                    yield self._event("response.in_progress", response=response)
                    if self._parts.begins_with_text:
                        for event in items.add(""):
                            yield event
                finish = piece.finish
                for part in self._parts.feed(piece):
                    for event in items.add(part):
                        yield event
        status = self._status_of(finish)
        for event in items.end(status):
            yield event
        saved = await self._saved(self._response(status, items.done))
        yield self._event(f"response.{status}", response=saved.model_dump())

    async def _saved(self, response: ResponseObject) -> ResponseObject:
        """Store a finished response if it is to be stored; return it, with what became of it."""
        if response.store and not await self._save(response):
            return response.model_copy(update={"store": False})
        return response

    def error_event(self, error: Exception) -> bytes:
        """Return the last event of a stream that began and could not be finished."""
        client_error = error_responses.to_client_error(error)
        return self._event(
            "error",
            code=client_error.code or client_error.kind,
            message=client_error.message,
            param=client_error.param,
            # Clients check every event for this field before its type.
            error=error_responses.openai_body(client_error).error.model_dump(),
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": next(self._sequence), **fields}
        return sse.format_named_event(kind, sse.to_json_line(data))

    def _response(
        self, status: ResponseStatus, output: Sequence[OutputItem] | None
    ) -> ResponseObject:
        """Return the response object: finished with an output, just begun without one."""
        body = self._body
        sampling = self.output.request.generations[0].sampling
        return ResponseObject(
            id=self._id,
            object="response",
            background=False,
            created_at=self.output.created,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=list(output or ()),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            reasoning=_reasoning(body),
            safety_identifier=body.safety_identifier,
            service_tier="default",
            store=self._stores,
            temperature=sampling.temperature if body.temperature is None else body.temperature,
            text=_text_config(body.text),
            tool_choice=_choice_of(body),
            tools=[tool.model_dump(include=_REPEATED_FIELDS) for tool in body.functions],
            top_p=sampling.top_p if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if output is None else self._usage(),
            user=body.user,
        )

    def _status_of(self, finish: Finish) -> ResponseStatus:
        cut = finish == "length" or self._parts.cut_in_call
        return "incomplete" if cut else "completed"

    def _usage(self) -> ResponsesUsage:
        n_prompt, n_generated = self.output.request.n_prompt, self.output.n_generated
        return ResponsesUsage(
            input_tokens=n_prompt,
            input_tokens_details=PromptTokensDetails(cached_tokens=self.output.n_cached),
            output_tokens=n_generated,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self._parts.n_thought_tokens
            ),
            total_tokens=n_prompt + n_generated,
        )


def _text_config(config: TextConfig | None) -> dict[str, Any]:
    fields = config.model_dump(by_alias=True, exclude_none=True) if config else {}
    return {"format": {"type": "text"}, **fields}


def _reasoning(body: ResponsesRequest) -> dict[str, str | None]:
    reasoning = body.reasoning
    return {
        "effort": None if reasoning is None else reasoning.effort,
        "summary": None if reasoning is None else reasoning.summary,
    }


def _choice_of(body: ResponsesRequest) -> str | dict[str, Any]:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump()


def _no_event(kind: str, **fields: Any) -> bytes:
    """Write no event, for a whole answer."""
    return b""
