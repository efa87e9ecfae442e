"""The latest values of something, and what share of them is how large."""

from bisect import bisect_right, insort
from collections import deque

#: Values that a sample remembers.
WINDOW = 512


class SlidingQuantile:
    """The latest values of something; old ones are forgotten, since habits change."""

    __slots__ = ("_latest", "_sorted", "_sum")

    def __init__(self) -> None:
        #: In order of time; the same values as in `_sorted`.
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, value: float) -> None:
        """One more; the oldest is forgotten for it."""
        if len(self._latest) == WINDOW:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest
        self._latest.append(value)
        insort(self._sorted, value)
        self._sum += value

    @property
    def mean(self) -> float:
        """Their mean; 0 when none is known."""
        return self._sum / len(self._sorted) if self._sorted else 0.0

    def quantile(self, q: float) -> float:
        """What a share `q` of them does not exceed; 0 when none is known."""
        if not self._sorted:
            return 0
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))]

    def check(self) -> None:
        """Audit: both orders hold the same values."""
        assert sorted(self._latest) == self._sorted
        assert len(self._latest) <= WINDOW
        total = sum(self._latest)
        assert abs(self._sum - total) <= 1e-6 * max(1.0, abs(total))
