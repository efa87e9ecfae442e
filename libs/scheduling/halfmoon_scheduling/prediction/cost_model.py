"""Predict durations from profiles, corrected by observed durations.

The profiles (`PrefillCost`, `DecodeCost`) come from the workers. Only seconds and bytes live here;
which worker is chosen is decided in `halfmoon_scheduling.placement`.
"""

from collections.abc import Collection
from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost, PrefillCost

#: Share that one observation has in the running mean, if all are equally long.
ALPHA = 0.2
#: The same share for prefills. They share forward passes, so one may seem to take no time and the
#: next one twice its own.
PREFILL_ALPHA = 0.1
#: Bounds of a correction. Beyond them the profile is wrong rather than the worker slow, and one
#: odd observation would count for long.
MIN_SCALE, MAX_SCALE = 0.1, 10.0
#: Share of its predicted seconds below which a request counts as the end of an earlier one's pass,
#: and the most of one pass.
JOINS_GROUP_BELOW, MAX_GROUP = 0.25, 32
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
    """Observed over predicted seconds, as the quotient of two sums that fade.

    Each request counts by its predicted seconds: with them it enters the sums, and by them the
    sums fade. If they faded by requests, a few short ones would outweigh a long one before. One
    pass may compute the end of one prompt and the start of the next: its seconds go to the first.
    So a quotient over few seconds is far off.

    The unit of fading is the mean size of a request, weighted by size itself. Sums that fade by
    `alpha` for each unit cover 1 / `alpha` requests if all are equal.

    Requests of one forward pass end together: the first one takes the seconds of the pass, and the
    others none. They count as one request, whose seconds are their sums.
    """

    alpha: float
    observed_s: float
    predicted_s: float
    #: Squared predicted seconds; over `predicted_s` they are the unit of fading.
    predicted_s2: float
    #: The quotient with the group, within `MIN_SCALE` and `MAX_SCALE`.
    value: float = 1.0
    #: The latest group, which the sums above lack: its sums, and how many there are.
    group_observed_s: float = 0.0
    group_predicted_s: float = 0.0
    n_group: int = 0
    #: Whether the pass under way began with a request whose seconds are unknown.
    is_group_unknown: bool = False

    @classmethod
    def starting(cls, alpha: float, predicted_s: float) -> "_Correction":
        """Start at 1, with the weight of 1 / `alpha` requests like the first one."""
        return cls(alpha, predicted_s / alpha, predicted_s / alpha, predicted_s**2 / alpha)

    def observe(self, observed_s: float, predicted_s: float) -> None:
        """Add seconds of one request to the latest group, or begin another one with it."""
        is_part = observed_s < JOINS_GROUP_BELOW * self.value * predicted_s
        if is_part and self.is_group_unknown:
            return
        self.is_group_unknown = False
        if not is_part or self.n_group == MAX_GROUP:
            self.observed_s, self.predicted_s, self.predicted_s2 = self._sums()
            self.group_observed_s, self.group_predicted_s, self.n_group = 0.0, 0.0, 0
        self.group_observed_s += observed_s
        self.group_predicted_s += predicted_s
        self.n_group += 1
        observed_sum_s, predicted_sum_s, _ = self._sums()
        self.value = min(MAX_SCALE, max(MIN_SCALE, observed_sum_s / predicted_sum_s))

    def _sums(self) -> tuple[float, float, float]:
        """Return the sums of observed, predicted and squared predicted seconds with the group."""
        if not self.n_group:
            return self.observed_s, self.predicted_s, self.predicted_s2
        group_s = self.group_predicted_s
        unit_s = (self.predicted_s2 + group_s**2) / (self.predicted_s + group_s)
        kept = (1 - self.alpha) ** (group_s / unit_s)
        return (
            # One odd observation must not count for long.
            kept * self.observed_s + min(self.group_observed_s, MAX_SCALE * group_s),
            kept * self.predicted_s + group_s,
            kept * self.predicted_s2 + group_s**2,
        )


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
        self._paths: dict[WorkerId, dict[WorkerId, ExponentialMean]] = {}

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

    def skip_prefill(self, worker: WorkerId) -> None:
        """Learn nothing of a prefill whose seconds are unknown, nor of the rest of its pass."""
        if (mean := self._scales.get(worker)) is not None:
            mean.is_group_unknown = True

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
        return n_bytes / self.bandwidth(source, reader) * (1 + n_active)

    def unseen_transfer_s(self, source: WorkerId, n_bytes: int, n_active: int) -> float:
        """Return the seconds of a transfer to any reader that is not in `readers`."""
        mean = self._sources.get(source)
        bandwidth = self._prior_bandwidth if mean is None else mean.value
        return n_bytes / bandwidth * (1 + n_active)

    def readers(self, source: WorkerId) -> Collection[WorkerId]:
        """Return the readers whose transfers from a source were observed."""
        return self._paths.get(source, {}).keys()

    def observe_transfer(
        self, source: WorkerId, reader: WorkerId, n_bytes: int, seconds: float, n_active: int
    ) -> None:
        """Learn the seconds of a transfer beside `n_active` others of the source."""
        if n_bytes >= MIN_OBSERVED_BYTES and seconds > 0:
            alone = n_bytes / seconds * (1 + n_active)
            prior = self.bandwidth(source, reader)
            self._sources.setdefault(source, ExponentialMean(self._prior_bandwidth)).observe(alone)
            paths = self._paths.setdefault(source, {})
            paths.setdefault(reader, ExponentialMean(prior)).observe(alone)

    def bandwidth(self, source: WorkerId, reader: WorkerId) -> float:
        """Return the bytes per second of one transfer alone on this path.

        Without observations of the path, those of the source count, else the prior.
        """
        if (paths := self._paths.get(source)) is not None and (mean := paths.get(reader)):
            return mean.value
        source_mean = self._sources.get(source)
        return self._prior_bandwidth if source_mean is None else source_mean.value

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that is gone; its next start may run on another machine."""
        self._scales.pop(worker, None)
        self._sources.pop(worker, None)
        self._paths.pop(worker, None)
        for source, paths in list(self._paths.items()):
            if paths.pop(worker, None) is not None and not paths:
                del self._paths[source]

    def check(self) -> None:
        """Check that corrections are within their bounds, and bandwidths positive."""
        assert all(MIN_SCALE <= mean.value <= MAX_SCALE for mean in self._scales.values())
        assert all(mean.value > 0 for mean in self._sources.values())
        assert all(paths for paths in self._paths.values())
        assert all(m.value > 0 for paths in self._paths.values() for m in paths.values())
        assert self._paths.keys() <= self._sources.keys()

    def _observe(self, worker: WorkerId, seconds: float, predicted_s: float, alpha: float) -> None:
        if predicted_s > 0:
            if (mean := self._scales.get(worker)) is None:
                mean = self._scales[worker] = _Correction.starting(alpha, predicted_s)
            mean.observe(seconds, predicted_s)
