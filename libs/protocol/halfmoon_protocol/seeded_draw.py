"""Define how a seed draws a token, so that the same seed draws the same token on any worker.

This is the definition, written to be read and to be translated. It imports nothing but arithmetic.
Engines compute the same faster; `libs/protocol/golden/draws.json` holds all of them together.

Every operation on a number marked float32 is rounded to float32 by itself, and no two are fused.
A weight is a multiple of 2^-33, so a sum of up to 2^20 weights in float64 is exact in any order.
"""

import ctypes
import math
import struct
from collections import Counter
from collections.abc import Sequence

from halfmoon_protocol.sampling import Sampling

_WORD = 2**64 - 1
#: 2^f for f in [-0.5, 0.5]: a polynomial of float32 coefficients, the highest power first.
_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.5bba14p-10",
        "0x1.3cea88p-7",
        "0x1.c6b752p-5",
        "0x1.ebf9bcp-3",
        "0x1.62e42ap-1",
        "0x1p0",
    )
)
_LEAST_TEMPERATURE = 1.2e-38
_LEAST_EXPONENT = -40.0
#: 1.5 · 2^23: adding it rounds to a whole number, which the lowest bits hold then.
_ROUNDER = 12582912.0
#: Adding and removing it rounds to a multiple of 2^-33.
_GRAIN = 2.0**-10


def choose_token(
    logits: Sequence[float],
    sampling: Sampling,
    position: int,
    history: Sequence[int] = (),
    n_prompt: int = 0,
) -> int:
    """Choose the token at a position of its sequence.

    Args:
        logits: one per token of the vocabulary, float32.
        sampling: without a grammar, which makes logits of forbidden tokens -inf beforehand.
        position: index in the sequence of prompt and answer; the first token after n tokens has n.
        history: all tokens before it, where penalties need them.
        n_prompt: of `history`, tokens of the client's prompt.
    """
    scores = adjust_scores(logits, sampling, history, n_prompt)
    highest = max(scores)
    if sampling.temperature == 0 or sampling.top_k == 1:
        return scores.index(highest)
    die = uniform_draw(sampling.seed, position)
    if not math.isfinite(highest):
        return int(die * len(scores))
    left = likely_tokens(scores, sampling)
    mass = die * sum(weight for _, weight in left)
    passed = 0.0
    for token, weight in left:
        passed += weight
        if passed > mass:
            return token
    return next(token for token, weight in reversed(left) if weight > 0)


def adjust_scores(
    logits: Sequence[float], sampling: Sampling, history: Sequence[int], n_prompt: int
) -> list[float]:
    """Add biases, then apply the penalties of tokens that came before."""
    scores = [_f32(logit) for logit in logits]
    for token, bias in sampling.logit_bias:
        scores[token] = _f32(_f32(logits[token]) + _f32(bias))
    if sampling.repetition_penalty != 1:
        penalty = _f32(sampling.repetition_penalty)
        for token in set(history):
            score = scores[token]
            scores[token] = _f32(score / penalty if score > 0 else score * penalty)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        for token, count in Counter(history[n_prompt:]).items():
            loss = sampling.frequency_penalty * count + sampling.presence_penalty
            scores[token] = _f32(scores[token] - loss)
    return scores


def likely_tokens(scores: Sequence[float], sampling: Sampling) -> list[tuple[int, float]]:
    """Return the tokens that min-p, top-k and top-p leave in turn, rising, with their weights."""
    highest = max(scores)
    temperature = max(sampling.temperature, _LEAST_TEMPERATURE)
    left = list(range(len(scores)))
    if sampling.min_p > 0:
        least = _f32(highest + temperature * math.log(sampling.min_p))
        left = [token for token in left if scores[token] >= least]
    # The likeliest first; of equal scores the lower token.
    left.sort(key=lambda token: (-scores[token], token))
    if sampling.top_k > 0:
        left = left[: sampling.top_k]
    weights = {token: weigh(scores[token], highest, temperature) for token in left}
    if sampling.top_p < 1:
        wanted = sampling.top_p * sum(weights.values())
        before, n = 0.0, 0
        while n < len(left) and (n == 0 or before < wanted):
            before += weights[left[n]]
            n += 1
        left = left[:n]
    return [(token, weights[token]) for token in sorted(left)]


def weigh(score: float, highest: float, temperature: float) -> float:
    """Compute exp((score - highest) / temperature), with the same bits everywhere."""
    scale = _f32(math.log2(math.e) / temperature)
    exponent = max(_f32(_f32(score - highest) * scale), _LEAST_EXPONENT)
    rounded = _f32(exponent + _ROUNDER)
    shift = _bits(rounded) << 23
    fraction = _f32(exponent - _f32(rounded - _ROUNDER))
    weight = _f32(fraction * _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:-1]:
        weight = _f32(_f32(weight + coefficient) * fraction)
    weight = _f32(weight + _COEFFICIENTS[-1])
    weight = _from_bits((_bits(weight) + shift) & 0xFFFFFFFF)
    return _f32(_f32(weight + _GRAIN) - _GRAIN)


def uniform_draw(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position: Philox-4x64-10, keyed by both.

    The counter is (1, 0, 0, 0); the number is made of the upper 53 bits of the first word.
    """
    a, b, c, d, first_key, second_key = 1, 0, 0, 0, seed, position
    for _ in range(10):
        x, y = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (y >> 64) ^ b ^ first_key, y & _WORD, (x >> 64) ^ d ^ second_key, x & _WORD
        first_key = (first_key + 0x9E3779B97F4A7C15) & _WORD
        second_key = (second_key + 0xBB67AE8584CAA73B) & _WORD
    return (a >> 11) * 2.0**-53


def _f32(value: float) -> float:
    """Round to float32; too large a number becomes infinite."""
    return ctypes.c_float(value).value


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
