"""Compute the KV, digests and tokens of a fake model, which are a function of the tokens alone.

In unsigned 64-bit integers that wrap, with numpy only:

    prefix      h[-1] = mix(seed),  h[i] = A·h[i-1] + mix(token[i])
    KV          word j of (layer l, position i) = mix(h[i] + G·(l·J + j)), but h[i] itself
                for l = j = 0: a later run learns the prefix by reading it from the pool
    digest      Σ over layers, positions, words of  P[i]·W[l, j]·word
    next token  mix(digest ^ dice) mod vocab, or the next higher one that is not masked

    score       every token is as likely as any: -ln vocab, and the likeliest is the one asked of

P and W are odd, so one changed bit anywhere in a sequence's KV changes the digest. KV of another
position, layer or sequence does too, but for a chance of 2^-64.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling, Stopping

HashWords = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Multipliers of SplitMix64.
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# The same as words, made once: making one takes as long as an operation on a short array.
_WORD_GOLDEN, _WORD_MIX_1, _WORD_MIX_2 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
_WORD_30, _WORD_27, _WORD_31 = np.uint64(30), np.uint64(27), np.uint64(31)
#: The chain's multiplier, odd so that it has an inverse.
_CHAIN = 0xD1342543DE82EF95
_CHAIN_INVERSE = pow(_CHAIN, -1, 1 << 64)
#: Tokens up to which the chain is computed by plain integers, faster than by numpy.
_FEW_TOKENS = 16


class FakeArithmetic:
    """The numbers of one fake model, of all its layers."""

    def __init__(
        self, *, seed: int, n_layers: int, row_words: int, n_vocab: int, max_context: int
    ) -> None:
        """Compute the weights.

        Args:
            seed: models with different ones give different KV and tokens.
            n_layers: layers of the model.
            row_words: words of one token's keys and values in one layer.
            n_vocab: bound of the tokens that are drawn.
            max_context: tokens of the longest sequence.
        """
        self._n_layers = n_layers
        self._n_vocab = n_vocab
        self._max_context = max_context
        #: The chain before the first token.
        self.origin = _mix_int(seed)
        self._powers = _powers(_CHAIN, max_context + 1)
        self._inverse_powers = _powers(_CHAIN_INVERSE, max_context + 1)
        #: P, by position.
        self.position_weights = _mix(np.arange(max_context, dtype=np.uint64)) | np.uint64(1)
        n_words = n_layers * row_words
        shape = (n_layers, row_words)
        words = np.arange(n_words, dtype=np.uint64)
        #: W, by layer and word.
        self.word_weights = (_mix(words + np.uint64(1 << 40)) | np.uint64(1)).reshape(shape)
        self._word_keys = (words * np.uint64(_GOLDEN)).reshape(shape)

    def chain(self, before: int, token_ids: Sequence[int]) -> HashWords:
        """Compute the chain over tokens: h[i] = A^(i+1)·before + Σ_j≤i A^(i-j)·mix(token[j])."""
        n = len(token_ids)
        if n <= _FEW_TOKENS:
            chain: list[int] = []
            for token in token_ids:
                before = (before * _CHAIN + _mix_int(int(token))) & _MASK
                chain.append(before)
            return np.array(chain, dtype=np.uint64)
        mixed = _mix(np.asarray(token_ids, dtype=np.uint64))
        sums = np.cumsum(mixed * self._inverse_powers[:n], dtype=np.uint64)
        return (sums + np.uint64(before * _CHAIN & _MASK)) * self._powers[:n]

    def rows(self, prefix: HashWords, first: int, n_layers: int) -> HashWords:
        """Compute the KV of some layers at each position: [n, layer, key words, value words]."""
        keys = self._word_keys[first : first + n_layers].reshape(-1)
        rows = _mix(prefix[:, None] + keys)
        if first == 0:
            rows[:, 0] = prefix
        return rows.reshape(len(prefix), n_layers, -1)

    def choose(self, digest: int, position: int, draw: Draw) -> int:
        """Draw the token at a position from the digest of all KV before it."""
        sampling = draw.sampling
        dice = 0
        if sampling.temperature > 0 and sampling.top_k != 1:
            dice = _mix_int(sampling.seed * _GOLDEN + position + 1)
        if sampling.penalises:
            history = np.asarray(draw.history, dtype=np.uint64)
            weights = self.position_weights[: len(history)]
            dice ^= _mix_int(int((_mix(history) * weights).sum(dtype=np.uint64)) + draw.n_prompt)
        return self._unmasked(_mix_int((digest ^ dice) & _MASK) % self._n_vocab, draw.masked)

    def _unmasked(self, token: int, masked: Sequence[int]) -> int:
        """Return the first token from this one on that is not masked; the token, if all are."""
        others = ((token + i) % self._n_vocab for i in range(len(masked) + 1))
        return next((other for other in others if other not in masked), token)

    def score(self, token: int, n_top: int) -> TokenScore:
        """Return a token's logprob, and those of `n_top` tokens."""
        logprob = -math.log(self._n_vocab)
        others = (other for other in range(n_top + 1) if other != token)
        top = [token, *others][: min(n_top, self._n_vocab)]
        return TokenScore(logprob, 1, tuple((each, logprob) for each in top))

    # -- the oracle --------------------------------------------------------------------------

    def expected(
        self,
        prompt: Sequence[int],
        n: int,
        sampling: Sampling,
        n_prompt: int,
        stopping: Stopping | None = None,
    ) -> list[int]:
        """Compute the `n` tokens that must follow `prompt`, without any pool.

        Args:
            prompt: all tokens before the first one to choose.
            n: tokens to choose.
            sampling: parameters of the choice.
            n_prompt: tokens of the client in `prompt`.
            stopping: masks stop tokens of the first new ones; None: nothing is masked.
        """
        tokens = list(prompt)
        prefix = self.chain(self.origin, prompt)
        digest = self._digest(prefix, 0)
        for n_new in range(n):
            history = tokens if sampling.penalises else ()
            masked = () if stopping is None else stopping.masked_after(n_new)
            draw = Draw(sampling, history, n_prompt if history else 0, masked=masked)
            tokens.append(self.choose(digest, len(tokens), draw))
            prefix = self.chain(int(prefix[-1]), tokens[-1:])
            if len(tokens) <= self._max_context:
                digest += self._digest(prefix, len(tokens) - 1)
        return tokens[len(prompt) :]

    def _digest(self, prefix: HashWords, start: int) -> int:
        """Compute the digest of correct KV of these positions."""
        weights = self.position_weights[start : start + len(prefix)]
        digest = 0
        for layer in range(self._n_layers):
            weighted = self.rows(prefix, layer, 1)[:, 0] * self.word_weights[layer]
            by_position = weighted.sum(axis=1, dtype=np.uint64)
            digest += int((by_position * weights).sum(dtype=np.uint64))
        return digest


def _powers(base: int, n: int) -> HashWords:
    """Return the first n powers of a base, from 1, wrapping."""
    factors = np.full(n, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mix(words: HashWords) -> HashWords:
    """Apply SplitMix64's output function (Steele, Lea, Flood 2014) to each word."""
    z = words + _WORD_GOLDEN
    z = (z ^ (z >> _WORD_30)) * _WORD_MIX_1
    z = (z ^ (z >> _WORD_27)) * _WORD_MIX_2
    return z ^ (z >> _WORD_31)


def _mix_int(word: int) -> int:
    """Apply the same function to one word; numpy would take ten times as long."""
    z = (word + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
