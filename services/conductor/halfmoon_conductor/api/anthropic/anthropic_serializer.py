"""Write an answer in the shapes of Anthropic's Messages API, whole or as named events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.anthropic.anthropic_objects import (
    AnthropicMessage,
    AnthropicUsage,
    ContentBlock,
    StopReason,
    TextContent,
    ToolUse,
)
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall, parse_complete_members
from halfmoon_conductor.tools.tool_call_ids import tool_call_name
from halfmoon_conductor.tools.tool_call_stream import TextOrCall, ToolCallStream, join_adjacent_text


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
        self._text = ToolCallStream(output.request.tool_call_rules)

    async def whole(self) -> AnthropicMessage:
        """Return the whole message once it is complete."""
        parts: list[TextOrCall] = []
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                parts += self._text.feed(piece)
                last = piece
        name = self.output.request.id
        content = [
            _block(part, name, number)
            for number, part in enumerate(join_adjacent_text(parts) or [""])
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
                    if not self._text.may_call:
                        for event in blocks.write_text(""):
                            yield event
                    yield _event("ping")
                last = piece
                for part in self._text.feed(piece):
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
        return ("tool_use" if self._text.n_calls else "end_turn"), None

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
        #: Whether a text block is open.
        self._text_is_open = False

    def add(self, part: TextOrCall) -> Iterator[bytes]:
        """Write text, or a call, which is a block of its own."""
        if isinstance(part, str):
            yield from self.write_text(part)
            return
        yield from self._close()
        use = _block(part, self._name, self._n_opened)
        assert isinstance(use, ToolUse), "a call becomes one"
        yield self._open({**use.model_dump(), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        yield _event("content_block_stop", index=self._n_opened - 1)

    def write_text(self, text: str) -> Iterator[bytes]:
        """Write text into the open block, or begin one."""
        if not self._text_is_open:
            self._text_is_open = True
            yield self._open({"type": "text", "text": ""})
        if text:
            yield self._delta({"type": "text_delta", "text": text})

    def end(self) -> Iterator[bytes]:
        """Close the open block; an empty answer has an empty block."""
        if not self._n_opened:
            yield from self.write_text("")
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> bytes:
        self._n_opened += 1
        return _event("content_block_start", index=self._n_opened - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._n_opened - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._text_is_open:
            self._text_is_open = False
            yield _event("content_block_stop", index=self._n_opened - 1)


def _block(part: TextOrCall, answer_id: str, number: int) -> ContentBlock:
    if isinstance(part, ParsedCall):
        name, arguments = part.name, parse_complete_members(part.arguments)
        call = tool_call_name(answer_id, 0, number)
        return ToolUse(type="tool_use", id=f"toolu_{call}", name=name, input=arguments)
    return TextContent(type="text", text=part)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.format_named_event(kind, sse.to_json_line({"type": kind, **fields}))
