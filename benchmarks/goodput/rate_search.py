"""Search the highest rate that is served well. No I/O, no clock.

A ladder first: the rate doubles while it is served well, or halves until it is. Then the interval
between the highest good rate and the lowest bad one is halved until it is narrow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt


@dataclass
class RateSearch:
    """State of one search."""

    #: Rate to try first, requests per second.
    first: float
    #: Share of requests within limits that makes a rate good.
    enough: float = 0.9
    #: Width at which the search ends: lowest bad rate over highest good one.
    precision: float = 1.15
    #: The search ends outside of these.
    least: float = 0.25
    most: float = 256.0
    tried: dict[float, float] = field(default_factory=dict)

    def next_rate(self) -> float | None:
        """Return the rate to try; None: the search has ended."""
        if not self.tried:
            return self.first
        low, high = self.best, self.lowest_bad
        if high is None:
            assert low is not None
            return low * 2 if low * 2 <= self.most else None
        if low is None:
            return high / 2 if high / 2 >= self.least else None
        return sqrt(low * high) if high / low > self.precision else None

    def rates(self) -> Iterator[float]:
        """Yield the rates to try; each must be recorded before the next one."""
        while (rate := self.next_rate()) is not None:
            yield rate

    def record(self, rate: float, good_share: float) -> None:
        """Keep what a rate came to."""
        self.tried[rate] = good_share

    @property
    def best(self) -> float | None:
        """Highest good rate below every bad one; None: there is none."""
        bad = self.lowest_bad
        good = [
            rate
            for rate, share in self.tried.items()
            if share >= self.enough and (bad is None or rate < bad)
        ]
        return max(good, default=None)

    @property
    def lowest_bad(self) -> float | None:
        """Lowest rate that was not served well; None: there is none."""
        return min((r for r, share in self.tried.items() if share < self.enough), default=None)
