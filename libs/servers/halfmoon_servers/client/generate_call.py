"""Define a request to a server, and the pieces of its answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Finish, Sampling, Stopping


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request in token ids.

    A later try has the delivered tokens behind the prompt, and a `stopping` of what is left.
    """

    #: Sent as ``X-Request-Id``; servers log it.
    request_id: str
    #: `ServerDescription.model`.
    model: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stopping: Stopping
    #: From `ServerSalts.server_salt`; empty: the cache is shared.
    salt: str = ""
    #: Names the blocks that another server computed for this request; see `pair_prefill`.
    kv_transfer_params: Mapping[str, Any] | None = None


class ServerUsage(msgspec.Struct, frozen=True):
    """The tokens of a request as the server counts them."""

    n_prompt: int
    n_output: int
    #: Tokens of the prompt that came from a cache; None: the server does not say.
    n_cached: int | None = None


class GeneratedTokens(msgspec.Struct, frozen=True):
    """The next tokens of an answer.

    The piece with the last token has a `finish`. Servers that count at the end send the usage in
    one more piece, without tokens.
    """

    token_ids: tuple[int, ...]
    #: One for each token, where `Sampling.logprobs` asks for them. Servers don't send ranks: a rank
    #: beyond the listed tokens is the lowest that is possible.
    scores: tuple[TokenScore, ...] = ()
    finish: Finish = ""
    usage: ServerUsage | None = None


class PairPrefill(msgspec.Struct, frozen=True):
    """A prompt that the prefill server of a pair has computed, and holds for the decode server."""

    kv_transfer_params: Mapping[str, Any]
    #: The token that the prefill server chose; the decode server chooses it once more.
    first: GeneratedTokens
