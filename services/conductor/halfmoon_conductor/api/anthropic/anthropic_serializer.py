"""Write an answer in the shapes of Anthropic's Messages API, whole or as named events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.answer_stream import (
    AnswerPart,
    AnswerStream,
    Thought,
    join_adjacent,
)
from halfmoon_conductor.api.anthropic.anthropic_objects import (
    AnthropicMessage,
    AnthropicUsage,
    ContentBlock,
    StopReason,
    TextContent,
    Thinking,
    ToolUse,
)
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall, parse_complete_members
from halfmoon_conductor.tools.tool_call_ids import tool_call_name


class MessagesSerializer:
    """Write one answer, whole or as server-sent events.

    Args:
        model: the model's name as the client wrote it.
    """

    #: Texts are quickly written.
    is_long = False

    def __init__(self, output: OutputProcessor, model: str) -> None:
        self.output = output
        self.model = model
        self._parts = AnswerStream(output.request)

    async def whole(self) -> AnthropicMessage:
        """Return the whole message once it is complete."""
        parts: list[AnswerPart] = []
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                parts += self._parts.feed(piece)
                last = piece
        name = self.output.request.id
        content = [
            _block(part, name, number) for number, part in enumerate(join_adjacent(parts) or [""])
        ]
        reason, sequence = self._stop_of(last)
        return self._message(content, reason, sequence)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; the first as soon as the first token exists."""
        last: OutputPiece | None = None
        blocks = _ContentBlocks(self.output.request.id)
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                if last is None:
                    message = self._message([], None, None).model_dump()
                    yield _event("message_start", message=message)
                    if self._parts.begins_with_text:
                        for event in blocks.add(""):
                            yield event
                    yield _event("ping")
                last = piece
                for part in self._parts.feed(piece):
                    for event in blocks.add(part):
                        yield event
        assert last is not None, "an answer has a piece"
        for event in blocks.end():
            yield event
        reason, sequence = self._stop_of(last)
        yield _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=self._usage().model_dump(),
        )
        yield _event("message_stop")

    def _stop_of(self, last: OutputPiece) -> tuple[StopReason, str | None]:
        if last.stop_string is not None:
            return "stop_sequence", last.stop_string
        if last.finish == "length":
            return "max_tokens", None
        return ("tool_use" if self._parts.n_calls else "end_turn"), None

    def _message(
        self, content: list[ContentBlock], reason: StopReason | None, sequence: str | None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=f"msg_{self.output.request.id.rpartition('-')[2]}",
            type="message",
            role="assistant",
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _usage(self) -> AnthropicUsage:
        n_cached = self.output.n_cached
        return AnthropicUsage(
            input_tokens=self.output.request.n_prompt - n_cached,
            output_tokens=self.output.n_generated,
            cache_read_input_tokens=n_cached,
            cache_creation_input_tokens=0,
        )


def anthropic_error_event(error: Exception) -> bytes:
    """Return the last event of a stream that began and could not be finished."""
    body = error_responses.anthropic_body(error_responses.to_client_error(error))
    return sse.format_named_event("error", body.model_dump_json())


class _ContentBlocks:
    """Write the content of a stream: one block after the other is opened, filled and closed.

    Args:
        name: from which the ids of calls are made.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._n_opened = 0
        #: The type of the open block: text, thinking, or none is open.
        self._open_type: Literal["text", "thinking"] | None = None

    def add(self, part: AnswerPart) -> Iterator[bytes]:
        """Write text or a thought into its open block, or a call, which is a block of its own."""
        if isinstance(part, ParsedCall):
            yield from self._call(part)
            return
        kind: Literal["text", "thinking"] = "thinking" if isinstance(part, Thought) else "text"
        text = part.text if isinstance(part, Thought) else part
        if self._open_type != kind:
            yield from self._close()
            self._open_type = kind
            empty = _block(Thought("") if kind == "thinking" else "", self._name, 0)
            yield self._open(empty.model_dump())
        if text:
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def end(self) -> Iterator[bytes]:
        """Close the open block; an empty answer has an empty block."""
        if not self._n_opened:
            yield from self.add("")
        yield from self._close()

    def _call(self, call: ParsedCall) -> Iterator[bytes]:
        yield from self._close()
        use = _block(call, self._name, self._n_opened)
        yield self._open({**use.model_dump(), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield self._stop()

    def _open(self, block: dict[str, Any]) -> bytes:
        self._n_opened += 1
        return _event("content_block_start", index=self._n_opened - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._n_opened - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._n_opened - 1)

    def _close(self) -> Iterator[bytes]:
        if self._open_type == "thinking":  # clients wait for it at the end of thoughts
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open_type is not None:
            self._open_type = None
            yield self._stop()


def _block(part: AnswerPart, answer_id: str, number: int) -> ContentBlock:
    if isinstance(part, ParsedCall):
        name, arguments = part.name, parse_complete_members(part.arguments)
        call = tool_call_name(answer_id, 0, number)
        return ToolUse(type="tool_use", id=f"toolu_{call}", name=name, input=arguments)
    if isinstance(part, Thought):
        return Thinking(type="thinking", thinking=part.text, signature="")
    return TextContent(type="text", text=part)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.format_named_event(kind, sse.to_json_line({"type": kind, **fields}))
