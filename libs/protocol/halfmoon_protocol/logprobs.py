"""Define the score of a token, which clients get as log probabilities."""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import MAX_ITEMS, unit

_LogProb = Annotated[float, unit("nat")]


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """One token at its place in a sequence, as the model itself sees it.

    Log probabilities are natural ones of the model's logits, before temperature, penalties,
    biases and truncation: what was drawn may be unlikely here.
    """

    #: The log probability; minus infinity and NaN are possible where the model's logits are.
    logprob: _LogProb
    #: 1 for the likeliest token of the vocabulary.
    rank: Annotated[int, unit("rank")]
    #: The likeliest tokens with their log probabilities, likeliest first, as many as requested.
    top: Annotated[
        tuple[
            tuple[
                Annotated[int, Meta(title="token"), unit("token id")],
                Annotated[_LogProb, Meta(title="logprob")],
            ],
            ...,
        ],
        Meta(max_length=MAX_ITEMS),
    ] = ()
