"""Write an answer in the shapes of OpenAI's Responses API, whole or as typed events."""

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.openai.openai_objects import PromptTokensDetails
from halfmoon_conductor.api.responses.responses_objects import (
    FunctionCall,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseObject,
    ResponseStatus,
    ResponsesUsage,
)
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest, TextConfig
from halfmoon_conductor.engine_io.gateway_interface import Finish
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_ids import tool_call_name
from halfmoon_conductor.tools.tool_call_stream import TextOrCall, ToolCallStream, join_adjacent_text

#: Fields of each function that an answer repeats.
_REPEATED_FIELDS = {"type", "name", "description", "parameters", "strict"}


class ResponsesSerializer:
    """Write one answer, whole or as server-sent events.

    Args:
        body: the client's request.
    """

    #: Texts are quickly written.
    is_long = False

    def __init__(self, output: OutputProcessor, body: ResponsesRequest) -> None:
        self.output = output
        self._body = body
        self._name = output.request.id.rpartition("-")[2]
        self._id = f"resp_{self._name}"
        self._text = ToolCallStream(output.request.tool_call_rules)
        self._sequence = itertools.count()

    async def whole(self) -> ResponseObject:
        """Return the whole response once it is complete."""
        parts: list[TextOrCall] = []
        finish: Finish = ""
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                parts += self._text.feed(piece)
                finish = piece.finish
        items = _OutputItems(self._name, _no_event)
        for part in join_adjacent_text(parts):
            for _ in items.add(part):
                pass
        status = self._status_of(finish)
        for _ in items.end(status):
            pass
        return self._response(status, items.done)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; the first as soon as the first token exists."""
        finish: Finish = ""
        started = False
        items = _OutputItems(self._name, self._event)
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                if not started:
                    started = True
                    response = self._response("in_progress", None).model_dump()
                    yield self._event("response.created", response=response)
                    yield self._event("response.in_progress", response=response)
                    if not self._text.may_call:
                        for event in items.add_text(""):
                            yield event
                finish = piece.finish
                for part in self._text.feed(piece):
                    for event in items.add(part):
                        yield event
        status = self._status_of(finish)
        for event in items.end(status):
            yield event
        response = self._response(status, items.done).model_dump()
        yield self._event(f"response.{status}", response=response)

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
            previous_response_id=None,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            reasoning=_reasoning(body),
            safety_identifier=body.safety_identifier,
            service_tier="default",
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=_text_config(body.text),
            tool_choice=_choice_of(body),
            tools=[tool.model_dump(include=_REPEATED_FIELDS) for tool in body.tools or ()],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if output is None else self._usage(),
            user=body.user,
        )

    def _status_of(self, finish: Finish) -> ResponseStatus:
        cut = finish == "length" or self._text.cut_in_call
        return "incomplete" if cut else "completed"

    def _usage(self) -> ResponsesUsage:
        n_prompt, n_generated = self.output.request.n_prompt, self.output.n_generated
        return ResponsesUsage(
            input_tokens=n_prompt,
            input_tokens_details=PromptTokensDetails(cached_tokens=self.output.n_cached),
            output_tokens=n_generated,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
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


def _choice_of(body: ResponsesRequest) -> str | dict[str, str]:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {"type": choice.type, "name": choice.name}


class _OutputItems:
    """Collect the output items one after the other, and write each item's events.

    Args:
        name: from which the answer's ids are made.
        event: writes one event.
    """

    def __init__(self, name: str, event: Callable[..., bytes]) -> None:
        self._name = name
        self._event = event
        #: Finished items.
        self.done: list[OutputItem] = []
        #: Texts of the open message; None: no message is open.
        self._text_parts: list[str] | None = None

    def add(self, part: TextOrCall) -> Iterator[bytes]:
        """Add text, or a call, which is an item of its own."""
        if isinstance(part, str):
            yield from self.add_text(part)
        else:
            yield from self._close("completed")
            yield from self._call(part)

    def add_text(self, text: str) -> Iterator[bytes]:
        """Add text to the open message, or begin one."""
        if self._text_parts is None:
            self._text_parts = []
            item = self._message("in_progress", None).model_dump()
            yield self._event("response.output_item.added", output_index=len(self.done), item=item)
            part = _output_text("").model_dump()
            yield self._event("response.content_part.added", **self._location, part=part)
        if text:
            self._text_parts.append(text)
            yield self._event(
                "response.output_text.delta", **self._location, delta=text, logprobs=[]
            )

    def end(self, status: ResponseStatus) -> Iterator[bytes]:
        """Close the open item; an empty answer has an empty message."""
        if not self.done:
            yield from self.add_text("")
        yield from self._close(status)

    def _call(self, call: ParsedCall) -> Iterator[bytes]:
        name = tool_call_name(self._name, 0, len(self.done))
        item = FunctionCall(
            type="function_call",
            id=f"fc_{name}",
            call_id=f"call_{name}",
            name=call.name,
            arguments=call.arguments,
            status="completed" if call.whole else "incomplete",
        )
        location = {"output_index": len(self.done)}
        started = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", **location, item=started.model_dump())
        call_location = {**location, "item_id": item.id}
        yield self._event(
            "response.function_call_arguments.delta", **call_location, delta=item.arguments
        )
        yield self._event(
            "response.function_call_arguments.done",
            **call_location,
            name=item.name,
            arguments=item.arguments,
        )
        yield self._event("response.output_item.done", **location, item=item.model_dump())
        self.done.append(item)

    def _close(self, status: ResponseStatus) -> Iterator[bytes]:
        if self._text_parts is None:
            return
        text = "".join(self._text_parts)
        item = self._message(status, text)
        yield self._event("response.output_text.done", **self._location, text=text, logprobs=[])
        part = item.content[0].model_dump()
        yield self._event("response.content_part.done", **self._location, part=part)
        yield self._event(
            "response.output_item.done", output_index=len(self.done), item=item.model_dump()
        )
        self._text_parts = None
        self.done.append(item)

    @property
    def _location(self) -> dict[str, Any]:
        """The location of the open message's text."""
        return {"item_id": self._message_id, "output_index": len(self.done), "content_index": 0}

    @property
    def _message_id(self) -> str:
        return f"msg_{self._name}_{len(self.done)}" if self.done else f"msg_{self._name}"

    def _message(self, status: ResponseStatus, text: str | None) -> OutputMessage:
        content = [] if text is None else [_output_text(text)]
        return OutputMessage(
            type="message", id=self._message_id, status=status, role="assistant", content=content
        )


def _no_event(kind: str, **fields: Any) -> bytes:
    """Write no event, for a whole answer."""
    return b""


def _output_text(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
