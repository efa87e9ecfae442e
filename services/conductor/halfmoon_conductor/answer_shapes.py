"""An answer in OpenAI's shapes: whole, or as server-sent events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import BaseModel

from halfmoon_conductor import sse
from halfmoon_conductor.answering import Answer
from halfmoon_conductor.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    FinishReason,
    PromptTokensDetails,
    Usage,
)


class AnswerShape(ABC):
    """Writes one answer.

    Args:
        model: its name as the client wrote it.
        with_usage: a stream ends with a chunk of the usage, and has null in the others.
    """

    def __init__(self, answer: Answer, model: str, *, with_usage: bool = False) -> None:
        self.answer = answer
        self.id = answer.order.generation.request_id
        self.model = model
        self._with_usage = with_usage

    async def whole(self) -> BaseModel:
        """All of it, once it is complete."""
        texts: list[str] = []
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                if piece.finish:
                    finish: FinishReason = piece.finish
        return self._whole("".join(texts), finish)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first is there as soon as the first token is."""
        begun = False
        async with aclosing(self.answer.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    for chunk in self._opening():
                        yield self._event(chunk)
                if piece.text or piece.finish:
                    for chunk in self._chunks(piece.text, piece.finish or None):
                        yield self._event(chunk)
        if self._with_usage:
            yield self._event(self._usage_chunk(), self.usage())
        yield sse.DONE

    def usage(self) -> Usage:
        """As far as the answer has been read."""
        n_prompt, n_generated = self.answer.order.n_prompt, self.answer.n_generated
        return Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n_generated,
            total_tokens=n_prompt + n_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.answer.n_cached),
        )

    def _event(self, chunk: CompletionChunk | ChatChunk, usage: Usage | None = None) -> bytes:
        if self._with_usage:
            chunk.usage = usage
        return sse.event(chunk.model_dump_json(exclude_unset=True))

    @abstractmethod
    def _whole(self, text: str, finish: FinishReason) -> BaseModel: ...

    @abstractmethod
    def _opening(self) -> list[CompletionChunk | ChatChunk]:
        """What goes before the first piece."""

    @abstractmethod
    def _chunks(self, text: str, finish: FinishReason | None) -> list[CompletionChunk | ChatChunk]:
        """One piece."""

    @abstractmethod
    def _usage_chunk(self) -> CompletionChunk | ChatChunk:
        """A chunk without choices."""


class CompletionShape(AnswerShape):
    """``text_completion``."""

    def _whole(self, text: str, finish: FinishReason) -> Completion:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.answer.created,
            model=self.model,
            choices=[CompletionChoice(index=0, text=text, logprobs=None, finish_reason=finish)],
            usage=self.usage(),
        )

    def _opening(self) -> list[CompletionChunk | ChatChunk]:
        return []

    def _chunks(self, text: str, finish: FinishReason | None) -> list[CompletionChunk | ChatChunk]:
        choice = CompletionChunkChoice(index=0, text=text, logprobs=None, finish_reason=finish)
        return [self._chunk([choice])]

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


class ChatShape(AnswerShape):
    """``chat.completion`` and its chunks."""

    def _whole(self, text: str, finish: FinishReason) -> ChatCompletion:
        message = AssistantMessage(role="assistant", content=text, refusal=None)
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.answer.created,
            model=self.model,
            choices=[ChatChoice(index=0, message=message, logprobs=None, finish_reason=finish)],
            usage=self.usage(),
        )

    def _opening(self) -> list[CompletionChunk | ChatChunk]:
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def _chunks(self, text: str, finish: FinishReason | None) -> list[CompletionChunk | ChatChunk]:
        chunks: list[CompletionChunk | ChatChunk] = []
        if text:
            chunks.append(self._chunk(ChatDelta(content=text)))
        if finish:
            chunks.append(self._chunk(ChatDelta(), finish))
        return chunks

    def _usage_chunk(self) -> ChatChunk:
        return self._chunk_of([])

    def _chunk(self, delta: ChatDelta, finish: FinishReason | None = None) -> ChatChunk:
        return self._chunk_of(
            [ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish)]
        )

    def _chunk_of(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.answer.created,
            model=self.model,
            choices=choices,
        )
