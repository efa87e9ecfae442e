"""Turn the tokens of an engine request into pieces of text, and count and time them."""

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
from halfmoon_conductor.generation.token_tag import TokenTag
from halfmoon_conductor.observability.metrics.generation_timer import GenerationTimer
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics, HttpOutcome
from halfmoon_conductor.text.echoed_prompt import detokenizer_after
from halfmoon_conductor.text.text_stream import TextStream
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_protocol.logprobs import TokenScore


class OutputProcessor:
    """Read the generations of one engine request, once.

    Args:
        charge: is called for every generated token, with 1.
        give_back: is called with the tokens of all prompts if the request is refused before its
            first token.
        received_s: `time.perf_counter` when the body had been received.
        tags_tokens: whether `token_tag` is to be kept.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: EngineRequest,
        tokenizer: Tokenizer,
        metrics: HttpMetrics,
        charge: Callable[[int], None],
        *,
        received_s: float,
        tags_tokens: bool = False,
        give_back: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.request = request
        self._give_back = give_back
        self._is_given_back = False
        self.created = int(time.time())
        #: Of the generated tokens of all pieces so far, if `tags_tokens`.
        self.token_tag = TokenTag()
        self.choices = [
            _Choice(
                gateway,
                request,
                index,
                tokenizer,
                metrics,
                charge,
                received_s=received_s,
                on_token=self.token_tag.add if tags_tokens else None,
                on_refused=self._on_refused,
            )
            for index in range(len(request.generations))
        ]

    @property
    def n_generated(self) -> int:
        """Tokens returned to the client so far."""
        return (
            sum(choice.n_generated for choice in self.choices)
            if self.request.returns_new_tokens
            else 0
        )

    @property
    def n_cached(self) -> int:
        """Tokens of the prompts that came from a cache; each prompt counts once."""
        return sum(choice.n_cached for choice in self.choices[:: self.request.n_per_prompt])

    def _on_refused(self) -> None:
        """Give the prompts back, once, unless a choice has begun."""
        if not self._is_given_back and not any(choice.n_generated for choice in self.choices):
            self._is_given_back = True
            self._give_back(self.request.n_prompt)

    def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """Yield a piece for each token of each choice; each choice's last piece has a `finish`.

        Close the generator to stop earlier, which cancels the generations.

        Raises:
            ContextLengthExceeded, ServerOverloaded, ServiceUnavailable, GenerationFailed: as
                `Gateway.generate`.
        """
        if len(self.choices) == 1:
            return self.choices[0].pieces()
        return merge_streams([choice.pieces() for choice in self.choices])


class _Choice:
    """One generation of an engine request."""

    def __init__(
        self,
        gateway: Gateway,
        request: EngineRequest,
        index: int,
        tokenizer: Tokenizer,
        metrics: HttpMetrics,
        charge: Callable[[int], None],
        *,
        received_s: float,
        on_token: Callable[[int], None] | None,
        on_refused: Callable[[], None],
    ) -> None:
        #: Tokens of the prompt that came from a cache, and tokens generated so far.
        self.n_cached = 0
        self.n_generated = 0
        #: Scores of the prompt's tokens but the first; set with the first piece, if requested.
        self.prompt_scores: tuple[TokenScore, ...] = ()
        self._index = index
        #: The field of its prompt, if there are several prompts.
        self._place = (
            f"prompt[{index // request.n_per_prompt}]"
            if len(request.generations) > request.n_per_prompt
            else None
        )
        self._generation: GenerationRequest = request.generations[index]
        self._returns_new_tokens = request.returns_new_tokens
        self._gateway = gateway
        self._text = TextStream(
            detokenizer_after(tokenizer, self._generation.prompt_token_ids)
            if request.echoed_prompts
            else tokenizer.detokenizer(),
            request.stop_strings,
            min_tokens=self._generation.stopping.min_new_tokens,
        )
        self._timer = GenerationTimer(metrics, received_s, self._generation.tenant)
        self._charge = charge
        self._on_token = on_token
        self._on_refused = on_refused

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """Yield a piece for each token; see `OutputProcessor.pieces`."""
        #: None for a request refused before its first token: its HTTP status counts it.
        outcome: HttpOutcome | None = "abort"
        last: OutputPiece | None = None
        self._timer.on_sent()
        try:
            async with aclosing(self._gateway.generate(self._generation)) as events:
                async for event in events:
                    self._count(event)
                    piece = self._piece(event)
                    if piece.finish:
                        outcome, last = piece.finish, piece
                        break
                    yield piece
            # Closed before the last piece is written: after a stop string the workers stop at once.
            if last is None:
                raise GenerationFailed("The generation ended without saying why.")
            self._timer.on_last_token()
            yield last
        except ContextLengthExceeded as error:
            outcome = None
            if self._place is None:
                raise
            message = f"{self._place}: {error.message}"
            raise ContextLengthExceeded(message, param=self._place) from None
        except (ServerOverloaded, ServiceUnavailable):
            outcome = None
            self._on_refused()
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            if outcome is not None:
                self._timer.on_end(outcome)

    def _piece(self, event: TokenEvent) -> OutputPiece:
        if not self._returns_new_tokens:
            # The one token that was generated is nothing to the client, nor is it how it ended.
            finish: Finish = "length" if event.finish else ""
            return OutputPiece(self._text.finish(), event.token, finish, self._index)
        # A stop token is counted and reported; its text is not shown.
        text = "" if event.finish == "stop" else self._text.push(event.token)
        if event.finish and not self._text.stopped:
            text += self._text.finish()
        finish = "stop" if self._text.stopped else event.finish
        return OutputPiece(
            text, event.token, finish, self._index, event.score, self._text.stopped_by
        )

    def _count(self, event: TokenEvent) -> None:
        if self.n_generated == 0:
            self.n_cached, self.prompt_scores = event.n_cached, event.prompt_scores
            n_prompt, n_new = len(self._generation.prompt_token_ids), int(self._returns_new_tokens)
            self._timer.on_first_token(event, n_prompt, n_new)
        else:
            self._timer.on_token()
        self.n_generated += 1
        if self._returns_new_tokens:
            self._charge(1)
        if self._on_token is not None:
            self._on_token(event.token)
