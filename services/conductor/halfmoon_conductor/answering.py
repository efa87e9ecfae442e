"""Generations being read: tokens in, pieces of text out; counts and times kept."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from halfmoon_conductor.errors import GenerationFailed, Overloaded, TooLong, Unavailable
from halfmoon_conductor.generation import Finish, Gateway, GenerationRequest, TokenEvent
from halfmoon_conductor.http_metrics import HttpMetrics
from halfmoon_conductor.intake import Order
from halfmoon_conductor.merging import merged
from halfmoon_conductor.text import TextStream
from halfmoon_conductor.tokenizer import Tokenizer
from halfmoon_protocol.scores import TokenScore

#: The outcome of what never began: its status counts it.
REFUSED = "refused"


class Piece(msgspec.Struct, frozen=True):
    """What one token adds to the answer; often no text at all."""

    text: str
    token: int
    finish: Finish = ""
    #: Which of the request's choices this belongs to.
    index: int = 0
    score: TokenScore | None = None
    #: The stop string that ended the text.
    stop_string: str | None = None


class Answer:
    """Reads one order's generations, once.

    Args:
        spend: told of every generated token, as somebody pays for it.
        began_s: `time.perf_counter` when the request had been read.
    """

    def __init__(
        self,
        gateway: Gateway,
        order: Order,
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

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """A piece for each token of each choice; each choice's last one has a `finish`.

        Whoever stops reading earlier must close this, which cancels the generations.

        Raises:
            TooLong, Overloaded, Unavailable, GenerationFailed: as `Gateway.generate`.
        """
        if len(self.choices) == 1:
            return self.choices[0].pieces()
        return merged([choice.pieces() for choice in self.choices])


class _Choice:
    """One generation of an order."""

    def __init__(
        self,
        gateway: Gateway,
        order: Order,
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
        self._metrics = metrics
        self._spend = spend
        self._began_s = began_s
        self._asked_s = began_s
        self._last_token_s = began_s

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """See `Answer.pieces`."""
        outcome, last = "abort", None
        self._asked_s = time.perf_counter()
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
            self._metrics.e2e_request_latency_s.observe(self._last_token_s - self._began_s)
            yield last
        except (TooLong, Overloaded, Unavailable):
            outcome = REFUSED
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            if outcome != REFUSED:
                self._metrics.request_success.labels(outcome).inc()

    def _piece(self, event: TokenEvent) -> Piece:
        if not self._shows_new:
            return Piece("", event.token, event.finish, self._index)
        # A stop token is counted and reported, and its text is not shown.
        text = "" if event.finish == "stop" else self._text.push(event.token)
        if event.finish and not self._text.stopped:
            text += self._text.finish()
        finish: Finish = "stop" if self._text.stopped else event.finish
        return Piece(text, event.token, finish, self._index, event.score, self._text.stopped_by)

    def _count(self, event: TokenEvent) -> None:
        now_s = time.perf_counter()
        if self.n_generated == 0:
            self.n_cached, self.prompt_scores = event.n_cached, event.prompt_scores
            tokenize_s = self._asked_s - self._began_s
            self._metrics.on_first_token(now_s - self._began_s, tokenize_s, event.stages)
            self._metrics.latencies.first_token(now_s - self._began_s, now_s)
            self._metrics.prompt_tokens.inc(len(self._generation.prompt_token_ids))
            self._metrics.prompt_tokens_cached.inc(event.n_cached)
        else:
            self._metrics.inter_token_latency_s.observe(now_s - self._last_token_s)
            self._metrics.latencies.next_token(now_s - self._last_token_s, now_s)
            if self.n_generated == 1:
                self._metrics.first_decode_s.observe(now_s - self._last_token_s)
        self._last_token_s = now_s
        self.n_generated += 1
        self._metrics.generation_tokens.inc()
        self._spend(1)
