"""An answer in OpenAI's shapes: whole, or as server-sent events."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from uuid import uuid4

from pydantic import BaseModel

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.json_writing import MAX_INLINE_ANSWER_TOKENS, dump_json
from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer, Scored
from halfmoon_conductor.api.openai.openai_objects import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionUsage,
    FinishReason,
    PromptTokensDetails,
    TextCompletion,
    ToolCall,
    ToolFunction,
)
from halfmoon_conductor.api.openai.openai_requests import SharedFields
from halfmoon_conductor.api.sse import EventTemplate
from halfmoon_conductor.generation.output_processor import OutputPiece, OutputProcessor
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser

Chunk = CompletionChunk | ChatChunk


@dataclass
class _Written:
    """What has been read of one choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Scored] = field(default_factory=list)
    finish: FinishReason = "stop"
    stop_reason: int | str | None = None
    #: As `OutputPiece.is_cut` of the last one.
    is_cut: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        """Of the new tokens."""
        return [token for token, _ in self.tokens]


class OpenAiSerializer(ABC):
    """Writes one answer.

    Args:
        body: what the client asked for.
    """

    def __init__(
        self, answer: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        self.answer = answer
        self.id = answer.order.id
        self.model = body.model
        self._body = body
        self._logprobs = logprobs
        #: Whether a piece says something even when it has no text.
        self._tells_tokens = body.n_top is not None or bool(body.return_token_ids)
        #: Whether pieces in the midst of a choice differ in their text only.
        self._only_texts = not (
            self._tells_tokens or body.wants_continuous_usage or answer.order.calling
        )
        n_prompts = answer.order.n_prompt * answer.order.n_per_prompt
        per_token = int(bool(body.return_token_ids))
        if body.n_prompt_top is not None:
            per_token += 1 + body.n_prompt_top
        #: Tokens and scores that the answer tells of its prompts.
        self._n_told_of_prompts = n_prompts * per_token
        #: Whether the answer that `whole` gave is long to write.
        self.is_long = False
        #: The event of such a piece, by choice.
        self._templates: dict[int, EventTemplate] = {}

    async def whole(self) -> BaseModel:
        """All of it, once it is complete."""
        written = [_Written() for _ in self.answer.choices]
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                choice = written[piece.index]
                choice.texts.append(piece.text)
                if self.answer.order.shows_new:
                    choice.tokens.append((piece.token, piece.score))
                if piece.finish:
                    choice.finish = piece.finish
                    choice.stop_reason = self._stop_reason(piece)
                    choice.is_cut = piece.is_cut
        self.is_long = self._n_told > MAX_INLINE_ANSWER_TOKENS
        return (
            await asyncio.to_thread(self._whole, written) if self.is_long else self._whole(written)
        )

    @property
    def _n_told(self) -> int:
        """Tokens and scores in the answer, besides its text."""
        n_new = self.answer.n_generated if self._tells_tokens else 0
        return n_new * (1 + (self._body.n_top or 0)) + self._n_told_of_prompts

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first is there as soon as the first token is."""
        begun: set[int] = set()
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    for event in await self._opened(piece.index):
                        yield event
                if self._only_texts and not piece.finish:
                    if piece.text:
                        yield self._template(piece.index).fill(piece.text)
                elif piece.text or piece.finish or self._tells_tokens:
                    for chunk in self._chunks(piece):
                        yield self._event(chunk)
        if self._body.wants_usage_chunk:
            yield self._event(self._usage_chunk(), self.usage())
        yield sse.DONE

    async def _opened(self, index: int) -> list[bytes]:
        """Events before a choice's first piece."""
        if self._n_told_of_prompts <= MAX_INLINE_ANSWER_TOKENS:
            return [self._event(chunk) for chunk in self._opening(index)]

        def written() -> list[bytes]:
            return [sse.format_event(dump_json(chunk).decode()) for chunk in self._opening(index)]

        return await asyncio.to_thread(written)

    def usage(self) -> CompletionUsage:
        """As far as the answer has been read."""
        n_prompt, n_generated = self.answer.order.n_prompt, self.answer.n_generated
        return CompletionUsage(
            prompt_tokens=n_prompt,
            completion_tokens=n_generated,
            total_tokens=n_prompt + n_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.answer.n_cached),
        )

    def _stop_reason(self, last: OutputPiece) -> int | str | None:
        """What a client asked to stop at, if that is what ended the text."""
        if last.stop_string is None and last.finish == "stop":
            return last.token if last.token in (self._body.stop_token_ids or ()) else None
        return last.stop_string

    def _template(self, index: int) -> EventTemplate:
        if index not in self._templates:
            mark = uuid4().hex
            (chunk,) = self._chunks(OutputPiece(mark, 0, "", index))
            self._templates[index] = EventTemplate(self._event(chunk), mark)
        return self._templates[index]

    def _event(self, chunk: Chunk, usage: CompletionUsage | None = None) -> bytes:
        if self._body.wants_usage_chunk:
            chunk.usage = self.usage() if self._body.wants_continuous_usage else usage
        return sse.format_event(chunk.model_dump_json(exclude_unset=True))

    def _prompt(self, index: int) -> list[Scored]:
        """The prompt's tokens, with their scores as far as there are some."""
        tokens = self.answer.order.prompt_of(index)
        scores = self.answer.choices[index].prompt_scores or (None,) * (len(tokens) - 1)
        return list(zip(tokens, (None, *scores), strict=True))

    @abstractmethod
    def _whole(self, written: Sequence[_Written]) -> BaseModel: ...

    @abstractmethod
    def _opening(self, index: int) -> list[Chunk]:
        """What goes before a choice's first piece."""

    @abstractmethod
    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        """One piece."""

    @abstractmethod
    def _usage_chunk(self) -> Chunk:
        """A chunk without choices."""


class CompletionSerializer(OpenAiSerializer):
    """``text_completion``."""

    def __init__(
        self, answer: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        super().__init__(answer, body, logprobs)
        #: Where the next token of each choice begins, in a stream's text.
        self._offsets = [0] * len(answer.choices)

    def _whole(self, written: Sequence[_Written]) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            object="text_completion",
            created=self.answer.created,
            model=self.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(written)],
            usage=self.usage(),
        )

    def _choice(self, index: int, written: _Written) -> CompletionChoice:
        echoed = self._prompt(index) if self.answer.order.echoes else []
        choice = CompletionChoice(
            index=index,
            text=self.answer.order.echo_of(index) + written.text,
            logprobs=self._told(index, [*echoed, *written.tokens]),
            finish_reason=written.finish,
        )
        if written.stop_reason is not None:
            choice.stop_reason = written.stop_reason
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._logprobs.prompt(self._prompt(index))
        if self._body.return_token_ids:
            choice.prompt_token_ids = list(self.answer.order.prompt_of(index))
            choice.token_ids = written.token_ids
        return choice

    def _opening(self, index: int) -> list[Chunk]:
        order = self.answer.order
        if not (order.echoes or self._body.return_token_ids):
            return []
        choice = CompletionChunkChoice(
            index=index,
            text=order.echo_of(index),
            logprobs=self._told(index, self._prompt(index)) if order.echoes else None,
            finish_reason=None,
        )
        if self._body.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = list(order.prompt_of(index)), []
        return [self._chunk([choice])]

    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        shown = self.answer.order.shows_new
        choice = CompletionChunkChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._told(piece.index, [(piece.token, piece.score)] if shown else []),
            finish_reason=piece.finish or None,
        )
        if (reason := self._stop_reason(piece)) is not None:
            choice.stop_reason = reason
        if self._body.return_token_ids:
            choice.token_ids = [piece.token] if shown else []
        return [self._chunk([choice])]

    def _told(self, index: int, tokens: list[Scored]) -> CompletionLogprobs | None:
        if self._body.n_top is None:
            return None
        told = self._logprobs.completion(tokens, self._offsets[index])
        self._offsets[index] += self._logprobs.n_characters(tokens)
        return told

    def _usage_chunk(self) -> CompletionChunk:
        return self._chunk([])

    def _chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        return CompletionChunk(
            id=self.id,
            object="text_completion",
            created=self.answer.created,
            model=self.model,
            choices=choices,
        )


class ChatSerializer(OpenAiSerializer):
    """``chat.completion`` and its chunks."""

    def __init__(
        self, answer: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        super().__init__(answer, body, logprobs)
        self._readers: dict[int, ToolCallParser] = {}

    def _whole(self, written: Sequence[_Written]) -> ChatCompletion:
        completion = ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.answer.created,
            model=self.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(written)],
            usage=self.usage(),
        )
        if self._body.prompt_logprobs is not None:
            completion.prompt_logprobs = self._logprobs.prompt(self._prompt(0))
        if self._body.return_token_ids:
            completion.prompt_token_ids = list(self.answer.order.prompt_of(0))
        return completion

    def _choice(self, index: int, written: _Written) -> ChatChoice:
        message = AssistantMessage(role="assistant", content=written.text, refusal=None)
        finish = written.finish
        if (reader := self._reader(index)) is not None:
            read = [*map(reader.feed, written.texts), reader.finish(cut=written.is_cut)]
            message.content = "".join(words for words, _ in read)
            calls = [call for _, calls in read for call in calls]
            if calls or reader.cut_in_call:
                message.content = message.content.strip() or None
            if calls:
                message.tool_calls = [_tool_call(call) for call in calls]
            finish = _finish_of(finish, reader)
        choice = ChatChoice(
            index=index,
            message=message,
            logprobs=self._told(written.tokens),
            finish_reason=finish,
        )
        if written.stop_reason is not None:
            choice.stop_reason = written.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = written.token_ids
        return choice

    def _opening(self, index: int) -> list[Chunk]:
        chunk = self._chunk(index, ChatDelta(role="assistant", content=""))
        if self._body.return_token_ids and index == 0:
            chunk.prompt_token_ids = list(self.answer.order.prompt_of(0))
        return [chunk]

    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        chunks: list[Chunk] = []
        text, calls = piece.text, list[ParsedCall]()
        finish: FinishReason | None = piece.finish or None
        if (reader := self._reader(piece.index)) is not None:
            n_before = reader.n_calls
            text, calls = reader.feed(piece.text)
            if piece.finish:
                rest, last = reader.finish(cut=piece.is_cut)
                text, calls = text + rest, calls + last
                finish = _finish_of(piece.finish, reader)
            for number, call in enumerate(calls, n_before):
                delta = ChatDelta(tool_calls=[_tool_call(call, number)])
                chunks.append(self._chunk(piece.index, delta))
        if text or self._tells_tokens:
            chunk = self._chunk(piece.index, ChatDelta(content=text))
            (choice,) = chunk.choices
            choice.logprobs = self._told([(piece.token, piece.score)])
            if self._body.return_token_ids:
                choice.token_ids = [piece.token]
            chunks.append(chunk)
        if piece.finish:
            final = self._chunk(piece.index, ChatDelta(), finish)
            if (reason := self._stop_reason(piece)) is not None:
                final.choices[0].stop_reason = reason
            chunks.append(final)
        return chunks

    def _reader(self, index: int) -> ToolCallParser | None:
        """The one that takes a choice's text apart, if the model has tools."""
        calling = self.answer.order.calling
        if calling is None:
            return None
        if index not in self._readers:
            self._readers[index] = ToolCallParser.of(calling)
        return self._readers[index]

    def _told(self, tokens: list[Scored]) -> ChatLogprobs | None:
        return None if self._body.n_top is None else self._logprobs.chat(tokens)

    def _usage_chunk(self) -> ChatChunk:
        return self._chunk_of([])

    def _chunk(self, index: int, delta: ChatDelta, finish: FinishReason | None = None) -> ChatChunk:
        return self._chunk_of(
            [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish)]
        )

    def _chunk_of(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.answer.created,
            model=self.model,
            choices=choices,
        )


def _finish_of(finish: FinishReason, reader: ToolCallParser) -> FinishReason:
    """The end of an answer with tools: a call that was cut off is never one to be made."""
    if reader.cut_in_call:
        return "length"
    return "tool_calls" if reader.n_calls and finish == "stop" else finish


def _tool_call(call: ParsedCall, index: int | None = None) -> ToolCall:
    """With an id of its own; in a stream with its place."""
    function = ToolFunction(name=call.name, arguments=call.arguments)
    made = ToolCall(id=f"call_{uuid4().hex}", type="function", function=function)
    if index is not None:
        made.index = index
    return made
