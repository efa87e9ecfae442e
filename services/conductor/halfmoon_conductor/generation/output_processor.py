"""Generations being read: tokens in, pieces of text out; counts and times kept."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from halfmoon_conductor.engine_io.engine_request import EngineRequest
from halfmoon_conductor.engine_io.gateway_interface import (
    Finish,
    Gateway,
    GenerationRequest,
    TokenEvent,
)
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_conductor.generation.stream_merging import merge_streams
from halfmoon_conductor.observability.metrics.generation_timer import GenerationTimer
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics, HttpOutcome
from halfmoon_conductor.text.text_stream import TextStream
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_protocol.logprobs import TokenScore


class OutputProcessor:
    """Reads one order's generations, once.

    Args:
        spend: told of every generated token, as somebody pays for it.
        began_s: `time.perf_counter` when the request had been read.
    """

    def __init__(
        self,
        gateway: Gateway,
        order: EngineRequest,
        tokenizer: Tokenizer,
        metrics: HttpMetrics,
        spend: Callable[[int], None],
        *,
        began_s: float,
    ) -> None:
        self.order = order
        self.created = int(time.time())
        self.choices = [
            _Choice(gateway, order, index, tokenizer, metrics, spend, began_s=began_s)
            for index in range(len(order.generations))
        ]

    @property
    def n_generated(self) -> int:
        """Tokens that the client gets, as far as read."""
        return sum(choice.n_generated for choice in self.choices) if self.order.shows_new else 0

    @property
    def n_cached(self) -> int:
        """Tokens of the prompts that came from a cache; each prompt counted once."""
        return sum(choice.n_cached for choice in self.choices[:: self.order.n_per_prompt])

    def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """A piece for each token of each choice; each choice's last one has a `finish`.

        Whoever stops reading earlier must close this, which cancels the generations.

        Raises:
            TooLong, Overloaded, Unavailable, GenerationFailed: as `Gateway.generate`.
        """
        if len(self.choices) == 1:
            return self.choices[0].pieces()
        return merge_streams([choice.pieces() for choice in self.choices])


class _Choice:
    """One generation of an order."""

    def __init__(
        self,
        gateway: Gateway,
        order: EngineRequest,
        index: int,
        tokenizer: Tokenizer,
        metrics: HttpMetrics,
        spend: Callable[[int], None],
        *,
        began_s: float,
    ) -> None:
        #: Tokens of the prompt that came from a cache, and tokens generated; as far as read.
        self.n_cached = 0
        self.n_generated = 0
        #: Of the prompt but for its first token; there with the first piece, if asked for.
        self.prompt_scores: tuple[TokenScore, ...] = ()
        self._index = index
        self._generation: GenerationRequest = order.generations[index]
        self._shows_new = order.shows_new
        self._gateway = gateway
        self._text = TextStream(
            tokenizer.detokenizer(),
            order.stop_strings,
            min_tokens=self._generation.stopping.min_new_tokens,
        )
        self._meter = GenerationTimer(metrics, began_s)
        self._spend = spend

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """See `OutputProcessor.pieces`."""
        #: None for what never began: its status counts it.
        outcome: HttpOutcome | None = "abort"
        last: OutputPiece | None = None
        self._meter.asked()
        try:
            async with aclosing(self._gateway.generate(self._generation)) as events:
                async for event in events:
                    self._count(event)
                    piece = self._piece(event)
                    if piece.finish:
                        outcome, last = piece.finish, piece
                        break
                    yield piece
            # Closed before the last piece is written: after a stop string nothing runs on.
            if last is None:
                raise GenerationFailed("The generation ended without saying why.")
            self._meter.on_last_token()
            yield last
        except (ContextLengthExceeded, ServerOverloaded, ServiceUnavailable):
            outcome = None
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            if outcome is not None:
                self._meter.ended(outcome)

    def _piece(self, event: TokenEvent) -> OutputPiece:
        if not self._shows_new:
            return OutputPiece("", event.token, event.finish, self._index)
        # A stop token is counted and reported, and its text is not shown.
        text = "" if event.finish == "stop" else self._text.push(event.token)
        if event.finish and not self._text.stopped:
            text += self._text.finish()
        finish: Finish = "stop" if self._text.stopped else event.finish
        return OutputPiece(
            text, event.token, finish, self._index, event.score, self._text.stopped_by
        )

    def _count(self, event: TokenEvent) -> None:
        if self.n_generated == 0:
            self.n_cached, self.prompt_scores = event.n_cached, event.prompt_scores
            self._meter.first_token(event, len(self._generation.prompt_token_ids))
        else:
            self._meter.token()
        self.n_generated += 1
        self._spend(1)
