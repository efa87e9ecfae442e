"""Compute a token's weight, exp((score - highest) / temperature), with the same bits everywhere.

A seed promises the same tokens on any worker. So workers with and without the extension, and with
any processor, must agree on each bit. Hence:

- A weight comes of single additions and multiplications in float32, which IEEE 754 defines. No two
  of them may be fused. Relative error of the exponential: below 2e-7.
- A weight is a multiple of 2^-33. So a sum in float64 of up to 2^20 weights is exact, in any order.
  A token of less than 2^-34 of the likeliest token's probability has no weight.

The extension does the same in src/sampling_weights.inl.
"""

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]

#: 2^f for f in [-0.5, 0.5]: a polynomial of degree 5 whose constant is 1; highest power first.
_COEFFICIENTS = tuple(
    np.float32(float.fromhex(text))
    for text in (
        "0x1.5bba14p-10",
        "0x1.3cea88p-7",
        "0x1.c6b752p-5",
        "0x1.ebf9bcp-3",
        "0x1.62e42ap-1",
        "0x1p0",
    )
)
#: Smaller exponents give no weight.
_LEAST_EXPONENT = np.float32(-40)
#: 1.5 · 2^23: adding it rounds to a whole number, which the lowest bits hold then.
_ROUNDER = np.float32(12582912)
#: Adding and removing it rounds to a multiple of 2^-33.
_GRAIN = np.float32(2**-10)
#: The least normal float32; smaller temperatures would be zero.
_LEAST_TEMPERATURE = 1.2e-38
#: Tokens that are computed at once: their intermediate numbers stay in a core's own cache.
_BLOCK = 8192


def effective_temperature(temperature: float) -> float:
    """Return a temperature whose inverse is finite in float32."""
    return max(temperature, _LEAST_TEMPERATURE)


def exponent_scale(temperature: float) -> float:
    """Return what a score's distance from the highest is multiplied by: log2(e) / temperature."""
    return math.log2(math.e) / effective_temperature(temperature)


def exact_weights(scores: Scores, highest: np.float32, temperature: float) -> Scores:
    """Compute the weights of scores, [n]; `highest` is finite and no score is above it."""
    weights = np.empty_like(scores)
    scale = np.float32(exponent_scale(temperature))
    with np.errstate(over="ignore"):  # a difference or an exponent may be -inf
        for start in range(0, len(scores), _BLOCK):
            part = slice(start, start + _BLOCK)
            _weigh(scores[part], highest, scale, weights[part])
    return weights


def _weigh(scores: Scores, highest: np.float32, scale: np.float32, weights: Scores) -> None:
    fraction = scores - highest
    fraction *= scale
    np.maximum(fraction, _LEAST_EXPONENT, out=fraction)
    rounded = fraction + _ROUNDER
    shifts = rounded.view(np.int32) << 23
    rounded -= _ROUNDER
    fraction -= rounded
    first, *others = _COEFFICIENTS
    np.multiply(fraction, first, out=weights)
    for coefficient in others[:-1]:
        weights += coefficient
        weights *= fraction
    weights += others[-1]
    bits = weights.view(np.int32)
    bits += shifts
    weights += _GRAIN
    weights -= _GRAIN
