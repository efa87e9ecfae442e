"""How likely the model held a token: what clients get as log probabilities."""

import msgspec


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """One token at its place in a sequence, as the model itself sees it.

    Log probabilities are natural ones of the model's logits, before temperature, penalties,
    biases and truncation: what was drawn may be unlikely here.
    """

    logprob: float
    #: 1 for the likeliest token of the vocabulary.
    rank: int
    #: The likeliest tokens with theirs, likeliest first; as many as were asked for.
    top: tuple[tuple[int, float], ...] = ()
