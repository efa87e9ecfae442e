"""Write the answer to a chat completion, whole or as server-sent events."""

from collections.abc import Sequence

from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer, Scored
from halfmoon_conductor.api.openai.openai_objects import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    ToolCall,
    ToolFunction,
)
from halfmoon_conductor.api.openai.openai_serializer import Chunk, OpenAiSerializer, WrittenChoice
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.reasoning.reasoning_parser import ReasoningParser
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_ids import tool_call_name
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_protocol.logprobs import TokenScore


class ChatSerializer(OpenAiSerializer):
    """Write ``chat.completion`` objects and their chunks."""

    def __init__(
        self, output: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        super().__init__(output, body, logprobs)
        self._parsers: dict[int, ToolCallParser] = {}
        start = output.request.reasoning_start
        #: One for each choice; none where all text is the answer.
        self._thoughts = [] if start is None else [ReasoningParser(start) for _ in output.choices]

    def usage(self) -> CompletionUsage:
        """Return the usage so far, with the thoughts' part of it."""
        usage = super().usage()
        if self._thoughts:
            n_tokens = sum(parser.n_tokens for parser in self._thoughts)
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=n_tokens)
        return usage

    def _whole(self, written: Sequence[WrittenChoice]) -> ChatCompletion:
        completion = ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.output.created,
            model=self.model,
            system_fingerprint=self.output.request.fingerprint or None,
            choices=[self._choice(index, choice) for index, choice in enumerate(written)],
            usage=self.usage(),  # behind the choices, which count the thoughts
        )
        if self._body.prompt_logprobs is not None:
            completion.prompt_logprobs = self._logprobs.prompt(self._scored_prompt(0))
        if self._body.return_token_ids:
            completion.prompt_token_ids = list(self.output.request.prompt_of(0))
        return completion

    def _choice(self, index: int, written: WrittenChoice) -> ChatChoice:
        thoughts, texts = self._taken_apart(index, written.texts)
        message = AssistantMessage(role="assistant", content="".join(texts), refusal=None)
        if self._thoughts:
            message.reasoning_content = thoughts or None
            message.content = message.content if message.content or not thoughts else None
        finish = written.finish
        if (parser := self._parser(index)) is not None:
            read = [*map(parser.feed, texts), parser.finish(cut=written.is_cut)]
            message.content = "".join(words for words, _ in read)
            calls = [call for _, calls in read for call in calls]
            if calls or parser.cut_in_call:
                message.content = message.content.strip() or None
            if calls:
                message.tool_calls = [
                    self._tool_call(call, index, number) for number, call in enumerate(calls)
                ]
            finish = _finish_of(finish, parser)
        choice = ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs_of(written.tokens),
            finish_reason=finish,
        )
        if written.stop_reason is not None:
            choice.stop_reason = written.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = written.token_ids
        return choice

    def _taken_apart(self, index: int, texts: Sequence[str]) -> tuple[str, Sequence[str]]:
        """Return the thoughts of a choice, and the pieces of its answer."""
        if not self._thoughts:
            return "", texts
        parser = self._thoughts[index]
        read = [*map(parser.feed, texts), parser.finish()]
        return "".join(thought for thought, _ in read), [answer for _, answer in read]

    def _opening_chunks(self, index: int) -> list[Chunk]:
        chunk = self._chunk(index, ChatDelta(role="assistant", content=""))
        if self._body.return_token_ids and index == 0:
            chunk.prompt_token_ids = list(self.output.request.prompt_of(0))
        return [chunk]

    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        chunks: list[Chunk] = []
        thought, text = self._thought_and_text(piece)
        calls = list[ParsedCall]()
        finish: FinishReason | None = piece.finish or None
        if (parser := self._parser(piece.index)) is not None:
            n_before = parser.n_calls
            text, calls = parser.feed(text)
            if piece.finish:
                rest, last = parser.finish(cut=piece.is_cut)
                text, calls = text + rest, calls + last
                finish = _finish_of(piece.finish, parser)
            for number, call in enumerate(calls, n_before):
                made = self._tool_call(call, piece.index, number)
                made.index = number
                delta = ChatDelta(tool_calls=[made])
                chunks.append(self._chunk(piece.index, delta))
        if thought or text or self._returns_tokens:
            delta = ChatDelta(reasoning_content=thought) if thought else ChatDelta(content=text)
            if thought and text:
                delta.content = text
            chunk = self._chunk(piece.index, delta)
            (choice,) = chunk.choices
            choice.logprobs = self._logprobs_of([(piece.token, piece.score)])
            if self._body.return_token_ids:
                choice.token_ids = [piece.token]
            chunks.append(chunk)
        if piece.finish:
            final = self._chunk(piece.index, ChatDelta(), finish)
            if (reason := self._stop_reason(piece)) is not None:
                final.choices[0].stop_reason = reason
            chunks.append(final)
        return chunks

    def _thought_and_text(self, piece: OutputPiece) -> tuple[str, str]:
        if not self._thoughts:
            return "", piece.text
        return self._thoughts[piece.index].read(piece.text, is_last=bool(piece.finish))

    def _parser(self, index: int) -> ToolCallParser | None:
        """Return the parser of a choice's tool calls, if the chat has tools."""
        rules = self.output.request.tool_call_rules
        if rules is None:
            return None
        if index not in self._parsers:
            self._parsers[index] = ToolCallParser.of(rules)
        return self._parsers[index]

    def _tool_call(self, call: ParsedCall, choice: int, number: int) -> ToolCall:
        name = tool_call_name(self.id, choice, number)
        function = ToolFunction(name=call.name, arguments=call.arguments)
        return ToolCall(id=f"call_{name}", type="function", function=function)

    def _logprobs_of(self, tokens: list[Scored]) -> ChatLogprobs | None:
        return None if self._body.n_top is None else self._logprobs.chat(tokens)

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk(index, ChatDelta(content=text))

    def _score_json(self, piece: OutputPiece, score: TokenScore) -> bytes:
        return self._logprobs.chat_json(piece.token, score)

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
            created=self.output.created,
            model=self.model,
            system_fingerprint=self.output.request.fingerprint or None,
            choices=choices,
        )


def _finish_of(finish: FinishReason, parser: ToolCallParser) -> FinishReason:
    """Return the finish reason of an answer with tools; "length" if a call was cut off."""
    if parser.cut_in_call:
        return "length"
    return "tool_calls" if parser.n_calls and finish == "stop" else finish
