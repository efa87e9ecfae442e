"""Compute mean and quantiles of the latest values of a quantity."""

from bisect import bisect_right, insort
from collections import deque

#: Values that are remembered.
WINDOW = 512


class SlidingQuantile:
    """Keep the latest values of a quantity and forget old ones, since traffic changes."""

    __slots__ = ("_latest", "_sorted", "_sum")

    def __init__(self) -> None:
        #: The same values as in `_sorted`, in order of time.
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, value: float) -> None:
        """Add a value, and forget the oldest one if there are too many."""
        if len(self._latest) == WINDOW:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest
        self._latest.append(value)
        insort(self._sorted, value)
        self._sum += value

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without any."""
        return self._sum / len(self._sorted) if self._sorted else 0.0

    def quantile(self, q: float) -> float:
        """Return the value that a share `q` of the values does not exceed; 0 without any."""
        if not self._sorted:
            return 0
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))]

    def check(self) -> None:
        """Check that both orders hold the same values."""
        assert sorted(self._latest) == self._sorted
        assert len(self._latest) <= WINDOW
        total = sum(self._latest)
        assert abs(self._sum - total) <= 1e-6 * max(1.0, abs(total))
