"""Write an answer in OpenAI's shapes: the parts that completions and chats share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar
from uuid import uuid4

import msgspec
from pydantic import BaseModel

from halfmoon_conductor.api import sse
from halfmoon_conductor.api.json_writing import MAX_INLINE_ANSWER_TOKENS, dump_json
from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer, Scored
from halfmoon_conductor.api.openai.openai_objects import (
    ChatChunk,
    CompletionChunk,
    CompletionUsage,
    FinishReason,
    PromptTokensDetails,
)
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.api.sse import EventTemplate
from halfmoon_conductor.engine_io.gateway_interface import Finish
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server import error_responses
from halfmoon_protocol.logprobs import TokenScore

Chunk = CompletionChunk | ChatChunk
_TemplateKey = tuple[type, str, bool, int, Finish]

#: Templates of earlier answers, with the id and time in them, by all else that is in an event.
_TEMPLATES: dict[
    tuple[type, str, bool, int, Finish], tuple[EventTemplate, tuple[bytes, bytes]]
] = {}
_MAX_TEMPLATES = 1024


@dataclass
class WrittenChoice:
    """The output of one choice so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Scored] = field(default_factory=list)
    finish: FinishReason = "stop"
    stop_reason: int | str | None = None
    #: `OutputPiece.is_cut` of the last piece.
    is_cut: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the new tokens."""
        return [token for token, _ in self.tokens]


class OpenAiSerializer(ABC):
    """Write one answer, whole or as server-sent events.

    Args:
        body: the client's request.
    """

    #: Whether a choice's last text and its finish are in one event.
    _ends_with_text: ClassVar[bool] = False

    def __init__(
        self, output: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        self.output = output
        self.id = output.request.id
        self.model = body.model
        self._body = body
        self._logprobs = logprobs
        #: Whether a piece is sent even when it has no text.
        self._returns_tokens = body.n_top is not None or bool(body.return_token_ids)
        #: Whether the pieces within a choice differ in their text only.
        self._is_text_only = not (
            self._returns_tokens
            or body.wants_continuous_usage
            or output.request.tool_call_rules
            or output.request.reasoning_start
        )
        #: Whether they differ in their text and its log probabilities only.
        self._is_scored_text = body.n_top is not None and not (
            body.return_token_ids
            or body.wants_continuous_usage
            or output.request.tool_call_rules
            or output.request.reasoning_start
        )
        n_prompts = output.request.n_prompt * output.request.n_per_prompt
        per_token = int(bool(body.return_token_ids))
        if body.n_prompt_top is not None:
            per_token += 1 + body.n_prompt_top
        #: Tokens and scores of prompts that the answer repeats.
        self._n_prompt_items = n_prompts * per_token
        #: Whether the answer that `whole` returned takes long to write.
        self.is_long = False
        #: Templates of events that differ in their text only, by choice and finish.
        self._templates: dict[tuple[int, Finish], EventTemplate] = {}

    async def whole(self) -> BaseModel:
        """Return the whole answer once it is complete."""
        written = [WrittenChoice() for _ in self.output.choices]
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                choice = written[piece.index]
                choice.texts.append(piece.text)
                if self.output.request.returns_new_tokens:
                    choice.tokens.append((piece.token, piece.score))
                if piece.finish:
                    choice.finish = piece.finish
                    choice.stop_reason = self._stop_reason(piece)
                    choice.is_cut = piece.is_cut
        self.is_long = self._n_items > MAX_INLINE_ANSWER_TOKENS
        return (
            await asyncio.to_thread(self._whole, written) if self.is_long else self._whole(written)
        )

    @property
    def _n_items(self) -> int:
        """Number of tokens and scores in the answer, besides its text."""
        n_new = self.output.n_generated if self._returns_tokens else 0
        return n_new * (1 + (self._body.n_top or 0)) + self._n_prompt_items

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; the first as soon as the first token exists."""
        started: set[int] = set()
        n_left, end = len(self.output.choices), b""
        async with aclosing(self.output.pieces()) as pieces:
            async for piece in pieces:
                if piece.index not in started:
                    started.add(piece.index)
                    for event in await self._opening_events(piece.index):
                        yield event
                written = self._written(piece)
                n_left -= bool(piece.finish)
                if not n_left:
                    end = written  # which leaves with what follows it
                elif written:
                    yield written
        if self._body.wants_usage_chunk:
            end += self._event(self._usage_chunk(), self.usage())
        yield end + sse.DONE

    def _written(self, piece: OutputPiece) -> bytes:
        """Return the events of a piece; empty if there is nothing to say."""
        if self._is_text_only and (not piece.finish or self._ends_with_text):
            if not piece.finish and not piece.text:
                return b""
            if not piece.finish or self._stop_reason(piece) is None:
                return self._template(piece.index, piece.finish).fill(piece.text)
        if self._is_scored_text and piece.score is not None and not piece.finish:
            scores = b'"logprobs":' + self._score_json(piece, piece.score)
            template = self._template(piece.index, "")
            return template.fill_around(piece.text, b'"logprobs":null', scores)
        reads_all = self._returns_tokens or self.output.request.reasoning_start is not None
        if piece.text or piece.finish or reads_all:
            return b"".join([self._event(chunk) for chunk in self._chunks(piece)])
        return b""

    async def _opening_events(self, index: int) -> list[bytes]:
        """Return the events before a choice's first piece."""
        if self._n_prompt_items <= MAX_INLINE_ANSWER_TOKENS:
            return [self._event(chunk) for chunk in self._opening_chunks(index)]

        def written() -> list[bytes]:
            return [
                sse.format_event(dump_json(chunk).decode()) for chunk in self._opening_chunks(index)
            ]

        return await asyncio.to_thread(written)

    def usage(self) -> CompletionUsage:
        """Return the usage so far."""
        n_prompt, n_generated = self.output.request.n_prompt, self.output.n_generated
        return CompletionUsage(
            prompt_tokens=n_prompt,
            completion_tokens=n_generated,
            total_tokens=n_prompt + n_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.output.n_cached),
        )

    def _stop_reason(self, last: OutputPiece) -> int | str | None:
        """Return the stop string or stop token that ended the text, if any."""
        if last.stop_string is None and last.finish == "stop":
            return last.token if last.token in (self._body.stop_token_ids or ()) else None
        return last.stop_string

    def _template(self, index: int, finish: Finish) -> EventTemplate:
        """Return the template of this answer's events that differ in their text only."""
        template = self._templates.get((index, finish))
        if template is None:
            template = self._templates[index, finish] = self._new_template(index, finish)
        return template

    def _new_template(self, index: int, finish: Finish) -> EventTemplate:
        """Return a template: an earlier answer's, with the id and the time of this one."""
        marks = msgspec.json.encode(self.id), b'"created":%d' % self.output.created
        name = f"{self.model}/{self.output.request.fingerprint}"
        key = (type(self), name, self._body.wants_usage_chunk, index, finish)
        if (known := _TEMPLATES.get(key)) is not None:
            template, earlier = known
            return template.replaced(*zip(earlier, marks, strict=True))
        mark = uuid4().hex
        if finish:
            (chunk,) = self._chunks(OutputPiece(mark, 0, finish, index))
        else:
            chunk = self._text_chunk(index, mark)
        template = EventTemplate(self._event(chunk), mark)
        if len(_TEMPLATES) >= _MAX_TEMPLATES:
            _TEMPLATES.clear()
        _TEMPLATES[key] = template, marks
        return template

    def _event(self, chunk: Chunk, usage: CompletionUsage | None = None) -> bytes:
        if self._body.wants_usage_chunk:
            chunk.usage = self.usage() if self._body.wants_continuous_usage else usage
        return sse.format_event(chunk.model_dump_json(exclude_unset=True))

    def _scored_prompt(self, index: int) -> list[Scored]:
        """Return the prompt's tokens, with their scores where they exist."""
        tokens = self.output.request.prompt_of(index)
        scores = self.output.choices[index].prompt_scores or (None,) * (len(tokens) - 1)
        return list(zip(tokens, (None, *scores), strict=True))

    @abstractmethod
    def _whole(self, written: Sequence[WrittenChoice]) -> BaseModel: ...

    @abstractmethod
    def _opening_chunks(self, index: int) -> list[Chunk]:
        """Return the chunks before a choice's first piece."""

    @abstractmethod
    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        """Return the chunks of one piece."""

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> Chunk:
        """Return the chunk of a piece without tokens and scores."""

    @abstractmethod
    def _score_json(self, piece: OutputPiece, score: TokenScore) -> bytes:
        """Write the log probabilities of a piece."""

    @abstractmethod
    def _usage_chunk(self) -> Chunk:
        """Return a chunk without choices."""


def openai_error_event(error: Exception) -> bytes:
    """Write the last event of a stream that began and could not be finished."""
    body = error_responses.openai_body(error_responses.to_client_error(error))
    return sse.format_event(body.model_dump_json())
