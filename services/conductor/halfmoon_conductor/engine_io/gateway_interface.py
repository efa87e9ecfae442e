"""Define the gateway: it takes a generation request and returns tokens.

The REST API knows HTTP, texts and token ids; the gateway knows workers and the scheduling core.
Both depend only on this module and on `errors`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling, Stopping

Finish = Literal["", "stop", "length"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that the workers serve."""

    #: The model's name in requests.
    name: str
    #: Most tokens of prompt and answer together that the model allows.
    max_context: int
    #: Most tokens of both that the largest prefill and decode workers have pages for, and that the
    #: model allows; none: `max_context`.
    fits: int | None = None
    #: Most tokens of an answer without a limit of its own; none: what fits.
    fair_share: int | None = None
    #: When the model became available here, in whole seconds since 1970.
    created: int
    #: Changes with the weights and with Halfmoon's version: then the same seed may draw others.
    fingerprint: str = ""

    @property
    def max_tokens(self) -> int:
        """Most tokens of prompt and answer of a request without a limit of its own."""
        return self.max_context if self.fits is None else self.fits

    def open_end(self, n_prompt: int) -> int:
        """Return the most new tokens of a request without a limit of its own; 0: none fit."""
        room = max(0, self.max_tokens - n_prompt)
        return room if self.fair_share is None else min(room, self.fair_share)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: a checked prompt in token ids, and how to sample."""

    #: The client's request id, ``cmpl-…`` or ``chatcmpl-…``; unique.
    request_id: str
    #: At least one token.
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    #: Prompt and new tokens together fit into `ModelCard.max_context`.
    stopping: Stopping
    #: True when the client set no limit: `stopping` has that of `ModelCard.open_end`.
    open_end: bool = False
    #: Requests share cached prefixes only with requests of the same salt.
    salt: str = ""
    #: Latency targets of the client; None: those of the conductor's settings.
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    #: Waiting requests with the largest priority go first.
    priority: int = 0
    #: The tenant's name; empty without API keys.
    tenant: str = ""


class TokenEvent(msgspec.Struct, frozen=True):
    """One generated token."""

    token: int
    #: "" before the last token; "stop": this is a stop token; "length": the requested length is
    #: reached.
    finish: Finish = ""
    #: Tokens of the prompt whose KV came from a cache; set in the first event.
    n_cached: int = 0
    #: Set if `Sampling.logprobs` asks for it.
    score: TokenScore | None = None
    #: Scores of the prompt's tokens but the first, if `Sampling.prompt_logprobs` asks for them; set
    #: in the first event.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: Seconds of each `ttft_stages.TtftStage` from the request to the first token; set in the first
    #: event, where known.
    stages: Mapping[str, float] | None = None


class Gateway(Protocol):
    """Generate tokens for requests."""

    @property
    def model(self) -> ModelCard | None:
        """The model served; None until `ready` was true once."""
        ...

    def ready(self) -> bool:
        """Return whether at least one prefill and one decode worker are alive."""
        ...

    def missing(self) -> Sequence[str]:
        """Return the roles without a live worker, such as ``prefill``; empty when ready."""
        ...

    def missing_hint(self) -> str:
        """Return why roles are missing, where that is known, with the way out; else ""."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield tokens as they are produced; the last one has a `finish`.

        Closing the generator (`aclose`, or cancelling the task that waits for it) cancels the
        request on every worker. One task advances and closes it.

        Raises:
            ContextLengthExceeded: before the first token; no worker can hold the request.
            ServerOverloaded: before the first token; admission refused the request.
            ServiceUnavailable: before the first token; no live prefill or decode worker.
            GenerationFailed: at any time; no worker is left to continue.
        """
        ...
