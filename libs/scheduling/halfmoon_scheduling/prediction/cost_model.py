"""Predict durations from profiles, corrected by observed durations.

The profiles (`PrefillCost`, `DecodeCost`) come from the workers. Only seconds and bytes live here;
which worker is chosen is decided in `halfmoon_scheduling.placement`.
"""

from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost, PrefillCost

#: Share that one observation has in the running mean.
ALPHA = 0.2
#: The same share for prefills. They share forward passes, so one may seem to take no time and the
#: next one twice its own.
PREFILL_ALPHA = 0.1
#: Bounds of a correction. Beyond them the profile is wrong rather than the worker slow, and one
#: odd observation would count for long.
MIN_SCALE, MAX_SCALE = 0.1, 10.0
#: Bytes per second of an unused path: those of a busy 10 Gb/s link.
PRIOR_BANDWIDTH = 1e9
#: Smaller transfers measure latency rather than bandwidth.
MIN_OBSERVED_BYTES = 64 * 1024


def unscaled_prefill_s(cost: PrefillCost, n_tokens: int, n_cached: int) -> float:
    """Return c0 + c1·(n-p) + c2·(n²-p²), the seconds on an idle worker."""
    computed = n_tokens - n_cached
    return cost.c0_s + cost.c1_s * computed + cost.c2_s * computed * (n_tokens + n_cached)


def unscaled_step_s(cost: DecodeCost, n_requests: float, context_tokens: float) -> float:
    """Return d0 + d1·requests + d2·context, the seconds of a decode step; counts may be means."""
    return cost.d0_s + cost.d1_s * n_requests + cost.d2_s * context_tokens


@dataclass(slots=True)
class ExponentialMean:
    """Keep an exponentially weighted mean that starts from a prior."""

    value: float

    def observe(self, value: float) -> None:
        """Add a value to the mean."""
        self.value += ALPHA * (value - self.value)


@dataclass(slots=True)
class _Correction:
    """Observed over predicted seconds, as the quotient of two running means.

    In the mean of quotients a short forward pass would count as much as a long one.
    """

    alpha: float
    observed_s: float
    predicted_s: float
    #: The quotient, within `MIN_SCALE` and `MAX_SCALE`.
    value: float = 1.0

    def observe(self, observed_s: float, predicted_s: float) -> None:
        # One odd observation must not count for long.
        observed_s = min(observed_s, MAX_SCALE * predicted_s)
        self.observed_s += self.alpha * (observed_s - self.observed_s)
        self.predicted_s += self.alpha * (predicted_s - self.predicted_s)
        self.value = min(MAX_SCALE, max(MIN_SCALE, self.observed_s / self.predicted_s))


class CostModel:
    """Predict seconds, for each worker and for each path of a transfer."""

    def __init__(self, *, prior_bandwidth: float = PRIOR_BANDWIDTH) -> None:
        """Start without observations.

        Args:
            prior_bandwidth: bytes per second of a source without observed reads.
        """
        self._prior_bandwidth = prior_bandwidth
        self._scales: dict[WorkerId, _Correction] = {}
        #: Bytes per second of one transfer alone, by source, and by source and reader.
        self._sources: dict[WorkerId, ExponentialMean] = {}
        self._paths: dict[tuple[WorkerId, WorkerId], ExponentialMean] = {}

    def prefill_s(self, worker: WorkerId, cost: PrefillCost, n_tokens: int, n_cached: int) -> float:
        """Return the seconds of a prefill of `n_tokens` tokens of which `n_cached` are cached."""
        # `unscaled_prefill_s` and `scale` are inlined: every placement calls this for every worker.
        computed = n_tokens - n_cached
        seconds = cost.c0_s + cost.c1_s * computed + cost.c2_s * computed * (n_tokens + n_cached)
        mean = self._scales.get(worker)
        return seconds if mean is None else mean.value * seconds

    def scale(self, worker: WorkerId) -> float:
        """Return how many times as long as in its profile a worker takes."""
        mean = self._scales.get(worker)
        return 1.0 if mean is None else mean.value

    def observe_prefill(
        self, worker: WorkerId, cost: PrefillCost, n_tokens: int, n_cached: int, seconds: float
    ) -> None:
        """Learn the seconds for which a prefill kept its worker busy.

        They are 0 if it shared all of its forward passes with others that counted them.
        """
        predicted_s = unscaled_prefill_s(cost, n_tokens, n_cached)
        self._observe(worker, seconds, predicted_s, PREFILL_ALPHA)

    def step_s(
        self, worker: WorkerId, cost: DecodeCost, n_requests: float, context_tokens: float
    ) -> float:
        """Return the seconds of a decode step over requests and tokens of context."""
        seconds = cost.d0_s + cost.d1_s * n_requests + cost.d2_s * context_tokens
        mean = self._scales.get(worker)
        return seconds if mean is None else mean.value * seconds

    def per_token_s(self, worker: WorkerId, cost: DecodeCost) -> float:
        """Return the seconds that each token of context adds to a decode step."""
        mean = self._scales.get(worker)
        return cost.d2_s if mean is None else mean.value * cost.d2_s

    def observe_step(
        self,
        worker: WorkerId,
        cost: DecodeCost,
        n_requests: int,
        context_tokens: int,
        seconds: float,
    ) -> None:
        """Learn the mean seconds of recent decode steps."""
        if seconds > 0:
            predicted_s = unscaled_step_s(cost, n_requests, context_tokens)
            self._observe(worker, seconds, predicted_s, ALPHA)

    def transfer_s(self, source: WorkerId, reader: WorkerId, n_bytes: int, n_active: int) -> float:
        """Return the seconds of a transfer from a source with `n_active` other transfers.

        All transfers of a source share its bandwidth.
        """
        mean = self._paths.get((source, reader)) or self._sources.get(source)
        bandwidth = self._prior_bandwidth if mean is None else mean.value
        return n_bytes / bandwidth * (1 + n_active)

    def observe_transfer(
        self, source: WorkerId, reader: WorkerId, n_bytes: int, seconds: float, n_active: int
    ) -> None:
        """Learn the seconds of a transfer beside `n_active` others of the source."""
        if n_bytes >= MIN_OBSERVED_BYTES and seconds > 0:
            alone = n_bytes / seconds * (1 + n_active)
            prior = self.bandwidth(source, reader)
            self._sources.setdefault(source, ExponentialMean(self._prior_bandwidth)).observe(alone)
            self._paths.setdefault((source, reader), ExponentialMean(prior)).observe(alone)

    def bandwidth(self, source: WorkerId, reader: WorkerId) -> float:
        """Return the bytes per second of one transfer alone on this path.

        Without observations of the path, those of the source count, else the prior.
        """
        mean = self._paths.get((source, reader)) or self._sources.get(source)
        return self._prior_bandwidth if mean is None else mean.value

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that is gone; its next start may run on another machine."""
        self._scales.pop(worker, None)
        self._sources.pop(worker, None)
        self._paths = {path: mean for path, mean in self._paths.items() if worker not in path}

    def check(self) -> None:
        """Check that corrections are within their bounds, and bandwidths positive."""
        assert all(MIN_SCALE <= mean.value <= MAX_SCALE for mean in self._scales.values())
        assert all(mean.value > 0 for mean in (*self._sources.values(), *self._paths.values()))
        assert all(source in self._sources for source, _ in self._paths)

    def _observe(self, worker: WorkerId, seconds: float, predicted_s: float, alpha: float) -> None:
        if predicted_s > 0:
            new = _Correction(alpha, predicted_s, predicted_s)
            self._scales.setdefault(worker, new).observe(seconds, predicted_s)
