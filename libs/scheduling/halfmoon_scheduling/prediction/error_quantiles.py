"""Learn by how much a kind of prediction errs, as quantiles of observed over predicted seconds.

Errors differ by the length of the prompt and by the time predicted before it: passes are shared,
and many small errors cancel each other in a long queue. So they are counted in buckets of both,
and by time alone. A bound comes from the finest of these with enough observations:

    length and time  →  time alone  →  the next shorter time, and so on  →  the prior

Only admitted requests are observed. A bucket whose bound refuses all would never be seen to do
better. Two things guard against that: counts fade with time, and a bucket without enough of them
takes the bound of shorter times, which are admitted.
"""

from math import log2

import msgspec

from halfmoon_scheduling.prediction.decaying_histogram import DecayingHistogram

#: Seconds after which an observation counts half.
HALF_LIFE_S = 30.0
#: Times are told apart by so many doublings of the shortest one, lengths by powers of four.
_N_DOUBLINGS, _N_LENGTHS = 24, 16
#: Seconds under which all times are one bucket.
_SHORTEST_S = 0.001


class ErrorBound(msgspec.Struct, frozen=True, gc=False):
    """A prediction, the bound that its errors allow, and where that comes from."""

    predicted_s: float
    #: Seconds that a share `quantile` of such requests does not exceed: predicted times `ratio`.
    bound_s: float
    #: The quantile of the errors that was used, and its ratio of observed to predicted seconds.
    quantile: float
    ratio: float
    #: The requests that it was learnt from, in words.
    bucket: str
    #: Observations of the bucket, faded ones as fractions.
    n_observed: float

    def __str__(self) -> str:
        return (
            f"{self.bound_s:.3g} s ({self.predicted_s:.3g} s times {self.ratio:.3g}, the"
            f" {self.quantile:g} quantile of errors of {self.n_observed:.0f} {self.bucket})"
        )


class ErrorQuantiles:
    """Hold the errors of one kind of prediction, and bound further ones."""

    def __init__(
        self,
        q: float,
        *,
        of: str,
        prior: float,
        per_doubling: int = 1,
        by_length: bool = True,
        half_life_s: float = HALF_LIFE_S,
    ) -> None:
        """Start without observations.

        Args:
            q: share of requests that shall not exceed their bounds.
            of: what the seconds are of that tell buckets apart, for explanations.
            prior: the ratio that is assumed of what has not been seen.
            per_doubling: buckets of time for each doubling.
            by_length: whether lengths are told apart too.
            half_life_s: seconds after which an observation counts half.
        """
        self.q = q
        self._of = of
        self._prior = prior
        self._per_doubling = per_doubling
        self._by_length = by_length
        self._half_life_s = half_life_s
        #: With fewer, not even the largest one is a bound of probability q.
        self.n_enough = q / (1 - q)
        #: By bucket of time and of length; made when first observed, at most so many as there are.
        self._by_both: dict[tuple[int, int], DecayingHistogram] = {}
        self._by_time: dict[int, DecayingHistogram] = {}

    def observe(
        self, n_tokens: int, time_s: float, predicted_s: float, observed_s: float, now: float
    ) -> None:
        """Learn from one prediction; one of 0 is ignored.

        Args:
            n_tokens: tokens of the prompt.
            time_s: the seconds that tell buckets apart, as in `bound`.
            predicted_s: seconds predicted.
            observed_s: seconds that it took.
            now: seconds.
        """
        if predicted_s <= 0:
            return
        ratio = observed_s / predicted_s
        time, length = self._bucket_of(time_s), _length_bucket(n_tokens)
        if time not in self._by_time:
            self._by_time[time] = DecayingHistogram(self._half_life_s)
        self._by_time[time].observe(ratio, now)
        if self._by_length:
            if (time, length) not in self._by_both:
                self._by_both[time, length] = DecayingHistogram(self._half_life_s)
            self._by_both[time, length].observe(ratio, now)

    def bound(self, n_tokens: int, time_s: float, predicted_s: float, now: float) -> ErrorBound:
        """Bound a prediction by what was learnt."""
        time, length = self._bucket_of(time_s), _length_bucket(n_tokens)
        own = self._by_both.get((time, length))
        if own is not None and (n := own.n(now)) >= self.n_enough:
            bucket = f"requests of {_lengths(length)} with {self._times(time)} {self._of}"
            return self._bound(predicted_s, own.quantile(self.q, now), bucket, n)
        for nearest in range(time, -1, -1):
            errors = self._by_time.get(nearest)
            if errors is not None and (n := errors.n(now)) >= self.n_enough:
                bucket = f"requests with {self._times(nearest)} {self._of}"
                return self._bound(predicted_s, errors.quantile(self.q, now), bucket, n)
        nearest, errors = self._nearest_observed(time, now)
        # Twice what is enough, so that a single odd observation does not decide.
        ratio = errors.quantile(self.q, now, prior=self._prior, n_prior=2 * self.n_enough)
        bucket = f"requests with {self._times(nearest)} {self._of}, and a prior of {self._prior:g}"
        return self._bound(predicted_s, ratio, bucket, errors.n(now))

    def _nearest_observed(self, time: int, now: float) -> tuple[int, DecayingHistogram]:
        """Return the longest time up to this one with an observation that has not faded."""
        for nearest in range(time, -1, -1):
            errors = self._by_time.get(nearest)
            if errors is not None and errors.n(now) >= 1:
                return nearest, errors
        return time, DecayingHistogram(self._half_life_s)

    def _bound(self, predicted_s: float, ratio: float, bucket: str, n: float) -> ErrorBound:
        return ErrorBound(predicted_s, predicted_s * ratio, self.q, ratio, bucket, n)

    @property
    def _n_times(self) -> int:
        return 1 + _N_DOUBLINGS * self._per_doubling

    def _bucket_of(self, seconds: float) -> int:
        if seconds < _SHORTEST_S:
            return 0
        doublings = log2(min(seconds, 1e9) / _SHORTEST_S)
        return min(self._n_times - 1, 1 + int(doublings * self._per_doubling))

    def _times(self, bucket: int) -> str:
        if bucket == 0:
            return f"under {_SHORTEST_S:g} s"
        low = _SHORTEST_S * 2 ** ((bucket - 1) / self._per_doubling)
        high = _SHORTEST_S * 2 ** (bucket / self._per_doubling)
        is_last = bucket == self._n_times - 1
        return f"{low:.4g} s or more" if is_last else f"{low:.4g} to {high:.4g} s"

    def check(self) -> None:
        """Audit: the buckets are bounded, and their counts are right."""
        assert len(self._by_time) <= self._n_times
        assert len(self._by_both) <= self._n_times * _N_LENGTHS
        for errors in (*self._by_time.values(), *self._by_both.values()):
            errors.check()


def _length_bucket(n_tokens: int) -> int:
    return min(_N_LENGTHS - 1, n_tokens.bit_length() // 2)


def _lengths(bucket: int) -> str:
    low, high = 2 ** max(0, 2 * bucket - 1), 2 ** (2 * bucket + 1) - 1
    return f"{low:,} to {high:,} tokens" if bucket < _N_LENGTHS - 1 else f"{low:,} tokens or more"
