"""Count ratios in logarithmic bins, and let old ones fade.

A ratio counts 1 when it is seen and half after each half-life. The memory is one float per bin,
whatever is counted.
"""

from math import log

#: Upper bounds of the bins: each is `_STEP` times the one before. Ratios beyond the ends count in
#: the first and the last bin.
LOWEST_RATIO, HIGHEST_RATIO, _STEP = 0.1, 10.0, 1.02
_N_BINS = 1 + round(log(HIGHEST_RATIO / LOWEST_RATIO) / log(_STEP))
_BOUNDS = tuple(LOWEST_RATIO * _STEP**i for i in range(_N_BINS))
#: Half-lives after which all weights are scaled down, long before one could overflow.
_RESCALED_AFTER = 32.0


def bin_of(ratio: float) -> int:
    """Return the bin of a ratio; its upper bound is not below the ratio, save in the last bin."""
    if ratio <= LOWEST_RATIO:
        return 0
    if ratio > _BOUNDS[-1]:
        return _N_BINS - 1
    guess = min(_N_BINS - 1, int(log(ratio / LOWEST_RATIO) / log(_STEP)))
    while guess < _N_BINS - 1 and _BOUNDS[guess] < ratio:
        guess += 1
    return guess


class DecayingHistogram:
    """Hold recent ratios with the weight that each has left."""

    __slots__ = ("_base_s", "_half_life_s", "_total", "_weights")

    def __init__(self, half_life_s: float) -> None:
        """Create an empty histogram whose counts halve every `half_life_s` seconds."""
        self._half_life_s = half_life_s
        #: By bin. A ratio seen at `_base_s` weighs 1 and a later one more: so nothing but the new
        #: weight changes when one is counted.
        self._weights = [0.0] * _N_BINS
        self._total = 0.0
        self._base_s = 0.0

    def observe(self, ratio: float, now: float) -> None:
        """Count a ratio."""
        age = (now - self._base_s) / self._half_life_s
        if age > _RESCALED_AFTER:
            factor = 0.5**age
            self._weights = [weight * factor for weight in self._weights]
            self._total = sum(self._weights)
            self._base_s, age = now, 0.0
        weight = 2.0**age
        self._weights[bin_of(ratio)] += weight
        self._total += weight

    def n(self, now: float) -> float:
        """Return how many ratios it holds, faded ones as fractions."""
        age = (now - self._base_s) / self._half_life_s
        return float(self._total * 0.5**age)

    def quantile(self, q: float, now: float, *, prior: float = 1.0, n_prior: float = 0.0) -> float:
        """Return a bound that the next ratio does not exceed with probability `q`.

        It is the ratio of rank `q` times (n + 1) among n. The 1 stands for the next ratio: this is
        the split conformal bound (Lei et al., 2018, doi:10.1080/01621459.2017.1307116). With
        fewer ratios than q / (1 - q) it is the largest. Ratios are taken to be spread evenly over
        their bin.

        Args:
            q: between 0 and 1.
            now: seconds.
            prior: a ratio that is taken to have been seen besides.
            n_prior: how often.
        """
        scale = 0.5 ** ((now - self._base_s) / self._half_life_s)
        n = self._total * scale + n_prior
        may_exceed = n - q * (n + 1)
        prior_bin = bin_of(prior)
        above = 0.0
        for i in range(_N_BINS - 1, -1, -1):
            here = self._weights[i] * scale
            if n_prior and i == prior_bin:
                here += n_prior
            if here and above + here > may_exceed:
                part = max(0.0, may_exceed - above) / here
                return float(_BOUNDS[i] * _STEP**-part)
            above += here
        return _BOUNDS[0]

    def check(self) -> None:
        """Check that no weight is negative, and that the total is their sum."""
        assert all(weight >= 0 for weight in self._weights)
        assert abs(self._total - sum(self._weights)) <= 1e-6 * max(1.0, self._total)
