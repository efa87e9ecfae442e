"""Define the score of a token, which clients get as log probabilities."""

import msgspec


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """One token at its place in a sequence, as the model itself sees it.

    Log probabilities are natural ones of the model's logits, before temperature, penalties,
    biases and truncation: what was drawn may be unlikely here.
    """

    logprob: float
    #: 1 for the likeliest token of the vocabulary.
    rank: int
    #: The likeliest tokens with their log probabilities, likeliest first, as many as requested.
    top: tuple[tuple[int, float], ...] = ()
