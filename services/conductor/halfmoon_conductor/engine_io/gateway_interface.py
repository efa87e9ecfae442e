"""The boundary between the REST front and the gateway: one request in, tokens out.

The front knows HTTP, texts and token ids; the gateway knows workers and the scheduling core.
Neither knows the other's inside: only what is here, and the errors of `errors`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling, Stopping

Finish = Literal["", "stop", "length"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that the workers serve."""

    #: As clients write it.
    name: str
    #: Tokens of prompt and answer together, at the most.
    max_context: int
    #: When it became available here, in whole seconds since 1970.
    created: int


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate, checked and in token ids."""

    #: The client's id of it, ``cmpl-…`` or ``chatcmpl-…``; unique.
    request_id: str
    #: At least one.
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    #: Prompt and new tokens together fit into `ModelCard.max_context`.
    stopping: Stopping
    #: Requests share cached prefixes only with those of the same salt.
    salt: str = ""
    #: Latencies that the client asks for; None: those of the conductor's settings.
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    #: Among requests that wait the largest goes first.
    priority: int = 0
    #: Who asks; empty without API keys.
    tenant: str = ""


class TokenEvent(msgspec.Struct, frozen=True):
    """One new token."""

    token: int
    #: "" while it goes on; "stop": this is a stop token; "length": the last one asked for.
    finish: Finish = ""
    #: Tokens of the prompt whose KV came from a cache; said by the first event.
    n_cached: int = 0
    #: If `Sampling.logprobs` asks for it.
    score: TokenScore | None = None
    #: If `Sampling.prompt_logprobs` asks for them, of all tokens of the prompt but the first;
    #: said by the first event.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: Where the time from the request to the first token went, in seconds by
    #: `first_token.Stage`; said by the first event, where it is known.
    stages: Mapping[str, float] | None = None


class Gateway(Protocol):
    """Where generations come from."""

    @property
    def model(self) -> ModelCard | None:
        """The model served; None until a worker has joined and said."""
        ...

    def ready(self) -> bool:
        """Whether at least one prefill and one decode worker are alive."""
        ...

    def missing(self) -> Sequence[str]:
        """The roles that nobody alive fills, such as ``prefill``; empty when ready."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens as they are produced; the last one has a `finish`.

        Closing the generator (`aclose`, or cancelling the task that waits for it) cancels
        the request on every worker. It is advanced and closed by one task.

        Raises:
            TooLong: before the first token; no worker can hold it.
            Overloaded: before the first token; refused by admission.
            Unavailable: before the first token; no live prefill or decode worker.
            GenerationFailed: at any time; nobody is left to go on with it.
        """
        ...
