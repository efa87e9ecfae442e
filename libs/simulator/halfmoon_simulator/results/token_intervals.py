"""Store the times between a request's tokens as runs of equal ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class TokenIntervals:
    """Times between tokens, in seconds."""

    #: (how many, seconds of each), in order of time.
    runs: tuple[tuple[int, float], ...] = ()

    @classmethod
    def after_gap(cls, gap_s: float, steps: Sequence[tuple[int, float]]) -> Self:
        """Return the intervals of a request that waited `gap_s` for its first step."""
        if not steps:
            return cls()
        n, seconds = steps[0]
        rest = ((n - 1, seconds),) if n > 1 else ()
        return cls(((1, seconds + gap_s), *rest, *steps[1:]))

    def then(self, gap_s: float, others: "TokenIntervals") -> "TokenIntervals":
        """Join these, a gap between two tries, and the intervals of the second try."""
        return TokenIntervals((*self.runs, (1, gap_s), *others.runs))

    @property
    def n(self) -> int:
        """Count the intervals: tokens less one."""
        return sum(n for n, _ in self.runs)

    @property
    def mean_s(self) -> float:
        """Mean interval; 0 when there are none."""
        n = self.n
        return sum(n * seconds for n, seconds in self.runs) / n if n else 0.0

    @property
    def max_s(self) -> float:
        """Longest interval; 0 when there are none."""
        return max((seconds for _, seconds in self.runs), default=0.0)

    def longest_tenth_s(self) -> float:
        """Average the longest 10 % (at least one): the TBT of Mooncake's FAST'25 paper."""
        left = wanted = -(-self.n // 10)
        total_s = 0.0
        for n, seconds in sorted(self.runs, key=lambda run: -run[1]):
            taken = min(n, left)
            total_s += taken * seconds
            left -= taken
            if not left:
                break
        return total_s / wanted if wanted else 0.0

    def quantile_s(self, q: float) -> float:
        """Return the value that a share `q` of them does not exceed; 0 when there are none."""
        return weighted_quantile(self.runs, q)


def weighted_quantile(runs: Iterable[tuple[int, float]], q: float) -> float:
    """Return the least value that a share `q` of all, counted with weights, does not exceed."""
    ordered = sorted(runs, key=lambda run: run[1])
    wanted = q * sum(n for n, _ in ordered)
    seen = 0
    for n, value in ordered:
        seen += n
        if seen >= wanted:
            return value
    return 0.0
