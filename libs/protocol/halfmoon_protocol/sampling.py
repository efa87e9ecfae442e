"""Define a request's sampling parameters and its end, with the limits that decoding enforces."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_ITEMS,
    MAX_STOP_TOKENS,
    PositiveTokens,
    TokenId,
    Tokens,
    unit,
)

#: Why a request ended: "stop" by a stop token, "length" by its bound; "" while it goes on.
Finish = Literal["", "stop", "length"]

#: Likeliest tokens whose log probabilities a request may ask for, at each position.
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_TEMPERATURE = 1e6
MAX_REPETITION_PENALTY = 1e6
#: The longest grammar; a JSON schema of that length has a thousand properties or so.
MAX_GRAMMAR_CHARACTERS = 65_536
#: The largest compiled grammar: a larger one takes seconds.
MAX_GRAMMAR_SYMBOLS = 50_000
#: Processor seconds that a request's grammar may take: for its check and, on each worker, for
#: compiling it and computing masks. Each token of the answer adds to that.
MAX_GRAMMAR_CPU_S = 2.0
MAX_GRAMMAR_TOKEN_CPU_S = 0.005
_Top = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS), unit("tokens")]
_Bias = Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, title="bias"), unit("logit")]
_Penalty = Annotated[float, Meta(ge=-2, le=2), unit("logit")]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the meaning that OpenAI's API and vLLM give them.

    The draw for the token at position i depends on (seed, i) alone, so a request that is
    placed again on another worker goes on with the very same tokens.
    """

    #: Logits are divided by it; 0 is greedy.
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE), unit("ratio")] = 1.0
    #: The likeliest tokens whose probabilities add up to this are kept; 1 keeps all.
    top_p: Annotated[float, Meta(gt=0, le=1), unit("ratio")] = 1.0
    #: So many of the likeliest tokens are kept; 0 keeps all.
    top_k: Tokens = 0
    #: Tokens are kept that are at least this times as likely as the likeliest; 0 keeps all.
    min_p: Annotated[float, Meta(ge=0, le=1), unit("ratio")] = 0.0
    #: Divides positive logits of all tokens so far, and multiplies negative ones; 1: no penalty.
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_REPETITION_PENALTY), unit("ratio")] = 1.0
    #: Subtracted from the logits of tokens that are in the answer.
    presence_penalty: _Penalty = 0.0
    #: Subtracted from a token's logit for each time that it is in the answer.
    frequency_penalty: _Penalty = 0.0
    #: Seed of the draws.
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, extra_json_schema={"format": "int64"}), unit("seed")
    ] = 0
    #: Added to the logits of these tokens before all else.
    logit_bias: Annotated[
        tuple[tuple[Annotated[TokenId, Meta(title="token")], _Bias], ...],
        Meta(max_length=MAX_ITEMS),
    ] = ()
    #: Report each new token's score with so many likeliest tokens; None: no scores.
    logprobs: _Top | None = None
    #: The same for the prompt's tokens. All of them are computed then, none come from a cache.
    prompt_logprobs: _Top | None = None

    #: What the whole answer must be: a grammar in Lark's syntax with llguidance's additions
    #: (``%json`` and a schema). Empty: anything.
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""

    @property
    def penalises(self) -> bool:
        """True when earlier tokens become less likely, or more."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_history(self) -> bool:
        """True when the choice of a token depends on the tokens before it."""
        return self.penalises or bool(self.grammar)


class Stopping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a request is finished, as far as token ids tell (stop strings are the gateway's)."""

    #: New tokens at the most, the first one included. In messages it counts those of this try, so
    #: a later try has what is left.
    max_new_tokens: PositiveTokens
    #: Each of these ends the request; it is reported and counted, its text is not shown.
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    #: New tokens of which none is a stop token, unless nothing else may come; counted as
    #: `max_new_tokens`.
    min_new_tokens: Tokens = 0

    @property
    def masks(self) -> bool:
        """True when stop tokens are kept from the choice of some tokens."""
        return self.min_new_tokens > 0 and bool(self.stop_token_ids)

    def masked_after(self, n_new: int) -> tuple[int, ...]:
        """Return the tokens that are kept from the choice of the one after `n_new` new tokens."""
        return self.stop_token_ids if n_new < self.min_new_tokens else ()
