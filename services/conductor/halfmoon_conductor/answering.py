"""One generation being read: tokens in, pieces of text out; counts and times kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from halfmoon_conductor.detokenizer import Detokenizer
from halfmoon_conductor.errors import GenerationFailed, Overloaded, TooLong, Unavailable
from halfmoon_conductor.generation import Finish, Gateway, TokenEvent
from halfmoon_conductor.http_metrics import HttpMetrics
from halfmoon_conductor.intake import Order
from halfmoon_conductor.text import TextStream

#: The outcome of what never began: its status counts it.
REFUSED = "refused"


class Piece(msgspec.Struct, frozen=True):
    """What one token adds to the answer; often no text at all."""

    text: str
    finish: Finish = ""


class Answer:
    """Reads one order's tokens, once.

    Args:
        began_s: `time.perf_counter` when the request had been read.
    """

    def __init__(
        self,
        gateway: Gateway,
        order: Order,
        detokenizer: Detokenizer,
        metrics: HttpMetrics,
        *,
        began_s: float,
    ) -> None:
        self.order = order
        self.created = int(time.time())
        #: Tokens of the prompt that came from a cache, and tokens generated; as far as read.
        self.n_cached = 0
        self.n_generated = 0
        self._gateway = gateway
        self._text = TextStream(
            detokenizer,
            order.stop_strings,
            min_tokens=order.generation.stopping.min_new_tokens,
        )
        self._metrics = metrics
        self._began_s = began_s
        self._last_token_s = began_s

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """A piece for each token; the last one has a `finish`.

        Whoever stops reading earlier must close this, which cancels the generation.

        Raises:
            TooLong, Overloaded, Unavailable, GenerationFailed: as `Gateway.generate`.
        """
        outcome, last = "abort", None
        try:
            async with aclosing(self._gateway.generate(self.order.generation)) as events:
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
        # A stop token is counted and reported, and its text is not shown.
        text = "" if event.finish == "stop" else self._text.push(event.token)
        if event.finish and not self._text.stopped:
            text += self._text.finish()
        return Piece(text, "stop" if self._text.stopped else event.finish)

    def _count(self, event: TokenEvent) -> None:
        now_s = time.perf_counter()
        if self.n_generated == 0:
            self.n_cached = event.n_cached
            self._metrics.time_to_first_token_s.observe(now_s - self._began_s)
            self._metrics.prompt_tokens.inc(self.order.n_prompt)
            self._metrics.prompt_tokens_cached.inc(event.n_cached)
        else:
            self._metrics.inter_token_latency_s.observe(now_s - self._last_token_s)
        self._last_token_s = now_s
        self.n_generated += 1
        self._metrics.generation_tokens.inc()
