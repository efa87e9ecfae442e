"""The highest rate at which enough requests are good: doubled until too few are, then halved in.

It decides which rate to try next, of what it was told of those before. No I/O.
"""

from dataclasses import dataclass


@dataclass
class RateSearch:
    """A search for the highest rate that holds.

    Args:
        first: the rate to begin with.
        enough: share of requests that must be good.
        precision: it ends when the rate that fails is at most so much larger than the one
            that holds, as a share of it.
        most_trials: or after so many.
    """

    first: float
    enough: float = 0.9
    precision: float = 0.05
    most_trials: int = 16
    #: The highest rate that held, and the lowest that did not.
    holds: float | None = None
    fails: float | None = None
    n_trials: int = 0

    def rate(self) -> float | None:
        """What to try next; None when the search is over."""
        if self.n_trials >= self.most_trials:
            return None
        match self.holds, self.fails:
            case None, None:
                return self.first
            case float(holds), None:
                return holds * 2
            case None, float(fails):
                return fails / 2
            case float(holds), float(fails):
                # One failure above a rate that held may be noise: below it nothing is tried.
                return None if fails <= holds * (1 + self.precision) else (holds + fails) / 2
        raise AssertionError

    def tried(self, rate: float, good_share: float) -> None:
        """Tell what came of a rate."""
        self.n_trials += 1
        if good_share >= self.enough:
            self.holds = rate if self.holds is None else max(self.holds, rate)
        else:
            self.fails = rate if self.fails is None else min(self.fails, rate)
