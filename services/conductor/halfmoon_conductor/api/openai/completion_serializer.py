"""Write the answer to a completion, whole or as server-sent events."""

from collections.abc import Sequence

from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer, Scored
from halfmoon_conductor.api.openai.openai_objects import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    TextCompletion,
)
from halfmoon_conductor.api.openai.openai_serializer import Chunk, OpenAiSerializer, WrittenChoice
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.text.echoed_prompt import TextOffsets
from halfmoon_protocol.logprobs import TokenScore


class CompletionSerializer(OpenAiSerializer):
    """Write ``text_completion`` objects."""

    _ends_with_text = True

    def __init__(
        self, output: OutputProcessor, body: SharedFields, logprobs: LogprobSerializer
    ) -> None:
        super().__init__(output, body, logprobs)
        #: Of each choice, where its tokens are in its text; only for log probabilities.
        self._offsets = (
            [] if body.n_top is None else [self._offsets_of(i) for i in range(len(output.choices))]
        )

    def _offsets_of(self, index: int) -> TextOffsets:
        request = self.output.request
        echo = request.echo_of(index) if request.echoed_prompts else None
        return self._logprobs.offsets(request.prompt_of(index), echo)

    def _whole(self, written: Sequence[WrittenChoice]) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            object="text_completion",
            created=self.output.created,
            model=self.model,
            system_fingerprint=self.output.request.fingerprint or None,
            choices=[self._choice(index, choice) for index, choice in enumerate(written)],
            usage=self.usage(),
        )

    def _choice(self, index: int, written: WrittenChoice) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self.output.request.echo_of(index) + written.text,
            logprobs=self._logprobs_of(index, self._echoed(index), written.tokens),
            finish_reason=written.finish,
        )
        if written.stop_reason is not None:
            choice.stop_reason = written.stop_reason
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._logprobs.prompt(self._scored_prompt(index))
        if self._body.return_token_ids:
            choice.prompt_token_ids = list(self.output.request.prompt_of(index))
            choice.token_ids = written.token_ids
        return choice

    def _opening_chunks(self, index: int) -> list[Chunk]:
        request = self.output.request
        if not (request.echoed_prompts or self._body.return_token_ids):
            return []
        choice = CompletionChunkChoice(
            index=index,
            text=request.echo_of(index),
            logprobs=self._logprobs_of(index, self._echoed(index), [])
            if request.echoed_prompts
            else None,
            finish_reason=None,
        )
        if self._body.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = list(request.prompt_of(index)), []
        return [self._chunk([choice])]

    def _chunks(self, piece: OutputPiece) -> list[Chunk]:
        returns_new = self.output.request.returns_new_tokens
        choice = CompletionChunkChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs_of(
                piece.index, [], [(piece.token, piece.score)] if returns_new else []
            ),
            finish_reason=piece.finish or None,
        )
        if (reason := self._stop_reason(piece)) is not None:
            choice.stop_reason = reason
        if self._body.return_token_ids:
            choice.token_ids = [piece.token] if returns_new else []
        return [self._chunk([choice])]

    def _echoed(self, index: int) -> list[Scored]:
        """Return the tokens of the prompt, with their scores, if the choice repeats them."""
        return self._scored_prompt(index) if self.output.request.echoed_prompts else []

    def _logprobs_of(
        self, index: int, echoed: Sequence[Scored], new: Sequence[Scored]
    ) -> CompletionLogprobs | None:
        if self._body.n_top is None:
            return None
        counted = self._offsets[index]
        places = counted.of_prompt([token for token, _ in echoed])
        places += counted.of_answer([token for token, _ in new])
        return self._logprobs.completion([*echoed, *new], places)

    def _text_chunk(self, index: int, text: str) -> CompletionChunk:
        return self._chunk(
            [CompletionChunkChoice(index=index, text=text, logprobs=None, finish_reason=None)]
        )

    def _score_json(self, piece: OutputPiece, score: TokenScore) -> bytes:
        (offset,) = self._offsets[piece.index].of_answer([piece.token])
        return self._logprobs.completion_json(piece.token, score, offset)

    def _usage_chunk(self) -> CompletionChunk:
        return self._chunk([])

    def _chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        return CompletionChunk(
            id=self.id,
            object="text_completion",
            created=self.output.created,
            model=self.model,
            system_fingerprint=self.output.request.fingerprint or None,
            choices=choices,
        )
